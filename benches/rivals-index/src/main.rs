//! Prefix indexes side by side, in one run: stolon-kvcache, dynamo-kv-router, kv-index.
//!
//! `cargo run --release` in this folder prints the tables of `benches/RESULTS.md`. Every index
//! answers every query of the workload correctly before it is timed.

mod measure;
mod rivals;
mod stolon;
mod workload;

use measure::{Row, print_table};
use workload::Workload;

fn main() {
    let workload = Workload::shared_prefix();
    println!("## Lookups: {} prompts of {} blocks, {} shared\n", workload.prompts.len(), 512, 128);
    let mut rows: Vec<Row> = Vec::new();
    rows.push(measure::memcmp_floor(&workload));
    rows.extend(stolon::lookups(&workload));
    rows.extend(rivals::lookups(&workload));
    print_table(&rows);
    stolon::beside_a_writer(&workload);
    stolon::writer_costs();
    stolon::wide(&Workload::wide());
}
