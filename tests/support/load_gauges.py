"""The gauges that are 0 when nobody is there, whichever server or stand-in publishes them."""

GAUGES_OF_LOAD = (
    "noria_num_requests_running",
    "noria_num_requests_waiting",
    "noria_num_requests_paused",
    "noria_num_tokens_running",
    "noria_num_tokens_waiting",
    "noria_kv_blocks_held",
    "noria_kv_usage",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
