//! The tests of the engine, in one program: each program that is linked takes seconds.

mod support {
    #[path = "../../../crates/models/checkpoint/tests/it/support/adapter_writer.rs"]
    pub(crate) mod adapter_writer;
    pub(crate) mod bits;
    pub(crate) mod copies;
    pub(crate) mod fake;
    #[path = "../../../crates/models/checkpoint/tests/it/support/model_adapter.rs"]
    pub(crate) mod model_adapter;
    pub(crate) mod pictures;
    #[cfg(feature = "images")]
    pub(crate) mod questions;
    #[cfg(feature = "grammar")]
    pub(crate) mod schemas;
    #[cfg(feature = "tiers")]
    pub(crate) mod tiers;
}

mod adapters;
mod architectures;
mod behavior;
mod boundaries;
mod cache;
#[cfg(feature = "grammar")]
mod cache_misses;
mod demo_model;
#[cfg(all(feature = "demo-model", feature = "images"))]
mod demo_vision;
#[cfg(feature = "candle")]
mod devices;
#[cfg(feature = "tiers")]
mod disk_size;
#[cfg(feature = "tiers")]
mod disk_tier;
mod documents;
#[cfg(feature = "tiers")]
mod draft_heads;
#[cfg(feature = "tiers")]
mod draft_models;
mod embeddings;
mod encoders;
#[cfg(feature = "tiers")]
mod exactness;
#[cfg(feature = "grammar")]
mod grammar;
#[cfg(feature = "grammar")]
mod history;
#[cfg(all(feature = "images", feature = "tiers"))]
mod image_tiers;
#[cfg(feature = "images")]
mod images;
mod marks;
mod models;
#[cfg(feature = "tiers")]
mod mtp;
#[cfg(feature = "object-store")]
mod object_tier;
mod own_backend;
#[cfg(feature = "grammar")]
mod own_tokenizer;
mod prefix_caching;
#[cfg(feature = "tiers")]
mod prefix_files;
mod real_models;
mod sessions;
mod skills;
mod speculation;
mod starting;
mod states;
#[cfg(feature = "tiers")]
mod stored_pins;
mod templates;
#[cfg(all(feature = "demo-model", feature = "schema"))]
mod tools;
#[cfg(feature = "schema")]
mod typed;
