"""The real SGLang on a CPU, for tests.

| module | what it gives |
|---|---|
| `plain_cpu_platform` | installed beside SGLang: computes with plain torch |
| `models` | small random models and an adapter, on disk |
| `harness` | what a scheduler does up to a loaded model, in this process |
| `isolated` | a function in a process of its own: a harness serves one folder for a process's life |
| `oracle` | the digest of every tensor that hangs on a model |
| `server` | a whole server: start, ask, kill, stop |
| `environment`, `processes`, `memory` | what the others share |

Only `harness` imports SGLang, and only when it is used.
"""
