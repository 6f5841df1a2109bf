//! Tests of the API over TCP, by a real HTTP client, on servers in this process. They use models with
//! random weights, models of fixtures and the built-in demo model.

mod access_api;
mod adapters_api;
mod agents;
mod cache_api;
mod cache_misses_api;
mod chat_api;
mod completions_api;
mod connections;
mod cors;
mod deadlines;
mod embeddings_api;
mod generation_options;
mod gzip;
mod hints_api;
mod history_api;
mod infill_api;
mod json_schema;
mod key_limits;
mod limits;
mod messages_api;
mod metrics_api;
mod model_names;
mod ollama_api;
mod openapi;
mod other_paths;
mod page_api;
mod responses_api;
mod root_path;
mod sessions_api;
mod skills_api;
mod structured_api;
mod support;
mod tokenize_api;
mod tools_api;
mod vllm_fields;
