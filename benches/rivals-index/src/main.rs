//! Prefix indexes side by side, in one run: stolon-kvcache, dynamo-kv-router, kv-index.
//!
//! `cargo run --release` in this folder prints the tables of `benches/RESULTS.md`. Every index
//! answers every query of the workload correctly before it is timed.

mod measure;
mod rivals;
mod stolon;
mod workload;

use workload::Workload;

fn main() {
    let workload = Workload::shared_prefix();
    println!("### Lookups: 200 prompts of 512 blocks, 128 shared\n");
    let mut entries = vec![measure::memcmp_floor(&workload)];
    entries.extend(stolon::entries(&workload));
    entries.extend(rivals::entries(&workload));
    measure::compare(&entries);
    drop(entries);
    stolon::beside_a_writer(&workload);
    stolon::writer_costs();
    stolon::wide(&Workload::wide());
}
