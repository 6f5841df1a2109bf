//! Two tenants of one engine. The cached prefixes of one are not visible to the other, not even
//! through the time to the first token, and can be removed without affecting the other's.
//!
//! ```sh
//! cargo run --release -p stolon --example tenants -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use stolon::{Engine, Request};

const DOCUMENT: &str = "A stolon is a stem that grows along the ground. At its nodes it takes root, \
    and a new plant grows there. Strawberries and mint spread in this way.\n";

/// A question about the document from a user of `tenant`.
fn request(tenant: &str, question: &str) -> Request {
    Request::text(format!("{DOCUMENT}{question}")).max_tokens(16).cache_salt(tenant)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let engine = Engine::builder().model(model).build().await?;
    let cached = |tenant, question| engine.cache().query_match_len(&request(tenant, question));

    engine.complete(request("ada", "What is a stolon?")).await?;
    println!("cached for another user of ada: {}", cached("ada", "Which plants have one?")?);
    println!("cached for bob: {}", cached("bob", "Which plants have one?")?);

    engine.complete(request("bob", "What is a stolon?")).await?;
    let blocks = engine.cache().evict_salt(Some("ada")).await?;
    println!("removed {blocks} blocks of ada");
    println!("cached for ada: {}", cached("ada", "Which plants have one?")?);
    println!("cached for bob: {}", cached("bob", "Which plants have one?")?);
    engine.shutdown().await;
    Ok(())
}
