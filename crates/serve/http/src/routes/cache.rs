//! Routes of the prefix cache, for operators.

use super::Role::{Client, Operator};
use super::{FILE, Group, Reply, Route, delete, get, post};
use crate::api::admin::Audit;
use crate::api::cache::{
    CacheRequest, CacheResults, CacheStatsReply, EventData, EventsQuery, Evicted, Explanations,
    FlushQuery, Flushed, Imported, Misses, PinCreated, PinDeleted, PinList, PinRequest, Policy,
    PolicyRequest, TiersReply, TokensQuery, Tree, TreeQuery, UnpinRequest,
};
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::llama_cpp::InfillRequest;
use crate::api::messages::MessagesRequest;
use crate::api::outline::{Outline, OutlineQuery, Prefix, PrefixQuery};
use crate::api::responses::ResponsesRequest;
use crate::api::sessions::SessionList;
use crate::handlers::{
    admin, cache, cache_events, cache_files, cache_misses, chat, completions, llama_cpp, messages,
    outline, responses, sessions,
};

/// The rows.
pub(super) fn group() -> Group {
    let mut routes = reads();
    routes.extend(explanations());
    routes.extend(prompts());
    routes.extend(whole());
    routes.extend(older_names());
    Group { name: "Prefix cache", description: "The prefix cache, for operators.", routes }
}

/// Routes that change nothing.
fn reads() -> Vec<Route> {
    vec![
        get("/v1/cache/tiers", Operator, cache::tiers)
            .described("cacheTiers", "KV outside of the KV pool, and the time that it has saved")
            .replies::<TiersReply>(),
        get("/v1/cache/stats", Operator, cache::stats)
            .described("cacheStats", "Blocks, hits and evictions")
            .replies::<CacheStatsReply>(),
        get("/v1/cache/tree", Operator, cache::tree)
            .described("cacheTree", "The prefix tree")
            .query::<TreeQuery>()
            .replies::<Tree>()
            .replies_as(Reply::Text("text/vnd.graphviz")),
        get("/v1/cache/outline", Operator, outline::outline)
            .described("cacheOutline", "The most important nodes of the prefix tree")
            .query::<OutlineQuery>()
            .replies::<Outline>()
            .fails(&[404]),
        get("/v1/cache/prefix/{id}", Operator, outline::prefix)
            .described("cachedPrefix", "The prefix that ends with a node of the tree")
            .query::<PrefixQuery>()
            .replies::<Prefix>()
            .fails(&[404]),
        get("/v1/cache/pins", Operator, cache::pins)
            .described("listPins", "All pins, and the prefixes that they hold")
            .query::<TokensQuery>()
            .replies::<PinList>(),
        get("/v1/cache/sessions", Operator, sessions::list_all)
            .described("listAllSessions", "The sessions of all clients")
            .replies::<SessionList>(),
        get("/v1/cache/audit", Operator, admin::audit)
            .described("auditCache", "Verify the accounting of KV blocks")
            .replies::<Audit>(),
        get("/v1/cache/policy", Operator, cache::policy)
            .described("cachePolicy", "The policies of eviction and admission")
            .replies::<Policy>(),
        get("/v1/cache/events", Operator, cache_events::events)
            .described(
                "cacheEvents",
                "A snapshot of the cache, then every change, as server-sent events",
            )
            .query::<EventsQuery>()
            .streams::<EventData>(),
    ]
}

/// Routes that explain why the prompt of a request is not cached. They take the request itself, and
/// are for the client that sends it.
fn explanations() -> Vec<Route> {
    let described = |route: Route, id: &'static str| {
        route
            .explains()
            .described(id, "Why a prompt is not cached; nothing is computed")
            .replies::<Explanations>()
            .fails(&[404])
    };
    vec![
        described(post("/v1/cache/explain", Client, chat::create), "explainChat")
            .takes::<ChatRequest>(),
        described(
            post("/v1/cache/explain/completions", Client, completions::create),
            "explainText",
        )
        .takes::<CompletionRequest>(),
        described(post("/v1/cache/explain/infill", Client, llama_cpp::infill), "explainInfill")
            .takes::<InfillRequest>(),
        described(post("/v1/cache/explain/messages", Client, messages::create), "explainMessages")
            .takes::<MessagesRequest>(),
        described(
            post("/v1/cache/explain/responses", Client, responses::create),
            "explainResponses",
        )
        .takes::<ResponsesRequest>(),
        get("/v1/cache/misses", Operator, cache_misses::list)
            .described("cacheMisses", "The requests that lost most tokens, and why")
            .replies::<Misses>(),
    ]
}

/// Routes for single prompts.
fn prompts() -> Vec<Route> {
    vec![
        post("/v1/cache/query", Operator, cache::query)
            .described("queryCache", "How much of each prompt is cached; nothing is computed")
            .takes::<CacheRequest>()
            .replies::<CacheResults>()
            .fails(&[404]),
        post("/v1/cache/warm", Operator, cache::warm)
            .described("warmCache", "Compute the part of each prompt that is not cached")
            .takes::<CacheRequest>()
            .replies::<CacheResults>()
            .generates()
            .fails(&[404]),
        post("/v1/cache/pin", Operator, cache::pin)
            .described("pinPrompt", "Keep a prompt from being evicted")
            .takes::<PinRequest>()
            .replies::<PinCreated>()
            .generates()
            .fails(&[404, 409]),
        post("/v1/cache/unpin", Operator, cache::unpin)
            .described("unpinPrompt", "End a pin, or all pins of prompts")
            .takes::<UnpinRequest>()
            .replies::<PinDeleted>()
            .fails(&[404]),
        post("/v1/cache/evict", Operator, cache::evict)
            .described("evictPrompts", "Remove prompts, or everything of a cache salt or tenant")
            .takes::<CacheRequest>()
            .replies::<Evicted>()
            .fails(&[404]),
        post("/v1/cache/export", Operator, cache_files::export)
            .described(
                "exportPrompt",
                "Compute the part of a prompt that is not cached, and send its KV as a file",
            )
            .takes::<CacheRequest>()
            .replies_as(Reply::Text(FILE))
            .generates()
            .fails(&[404, 409, 501]),
        post("/v1/cache/import", Operator, cache_files::import)
            .described("importPrompt", "Add the file of an exported prompt to the cache")
            .takes_file()
            .replies::<Imported>()
            .generates()
            .fails(&[409, 501]),
    ]
}

/// Routes that change the whole cache.
fn whole() -> Vec<Route> {
    vec![
        post("/v1/cache/flush", Operator, cache::flush)
            .described("flushCache", "Remove everything that no request uses, and end all pins")
            .query::<FlushQuery>()
            .replies::<Flushed>(),
        post("/v1/cache/policy", Operator, cache::set_policy)
            .described("setCachePolicy", "Change the policies of eviction and admission")
            .takes::<PolicyRequest>()
            .replies::<Policy>(),
    ]
}

/// Older names of the routes above, which are not described.
fn older_names() -> Vec<Route> {
    vec![
        get("/admin/tree", Operator, cache::tree),
        get("/admin/pins", Operator, cache::pins),
        post("/admin/pins", Operator, cache::pin),
        delete("/admin/pins/{id}", Operator, cache::delete_pin),
    ]
}
