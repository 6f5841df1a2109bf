//! Compares prefix indexes in one run: stolon-kvcache, dynamo-kv-router and kv-index.
//!
//! `cargo run --release` in this folder prints the tables of `benches/history/prefix-index.md` and
//! draws `benches/throughput.svg`. With the names of parts as arguments (`lookups`, `wide`,
//! `writer`, `plot`), it runs only those parts. Each index must answer every kind of query correctly before
//! it is timed.

mod measure;
mod plot;
mod rivals;
mod stolon;
mod workload;

use measure::Entry;
use workload::Workload;

fn entries(workload: &Workload) -> Vec<Entry<'_>> {
    let mut entries = vec![measure::memcmp_floor(workload)];
    entries.extend(stolon::entries(workload));
    entries.extend(rivals::entries(workload));
    entries
}

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let workload = Workload::shared_prefix();
    if wanted("lookups") {
        println!("### Lookups: 200 prompts of 512 blocks, 128 shared\n");
        measure::compare(&workload, &entries(&workload));
    }
    if wanted("writer") {
        stolon::latency_with_a_writer(&workload);
        stolon::writer_costs();
    }
    if wanted("plot") {
        plot::draw(&workload, &entries(&workload));
    }
    if wanted("wide") {
        let workload = Workload::wide();
        println!("### A million cached blocks, 10,000 children at the root\n");
        measure::compare(&workload, &entries(&workload));
        stolon::index_memory(&workload);
    }
}
