//! Plots the throughput against the number of readers: for all indexes with readers only, and for
//! stolon-kvcache with a concurrent writer, with and without a lock.

use crate::measure::{Entry, quantile, throughput};
use crate::stolon;
use crate::workload::Workload;
use plotters::prelude::*;

const READERS: [usize; 4] = [1, 2, 4, 8];
const RUNS: usize = 3;
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../throughput.svg");

type Line = (&'static str, Vec<f64>);

/// Measures, prints the table, and draws the plot.
pub fn draw(workload: &Workload, entries: &[Entry<'_>]) {
    let count = workload.prompts.len();
    let alone: Vec<Line> = entries
        .iter()
        .map(|entry| {
            let rate = |readers| {
                let mut rates: Vec<f64> =
                    (0..RUNS).map(|_| throughput(entry, readers, count)).collect();
                quantile(&mut rates, 0.5)
            };
            (entry.name, READERS.map(rate).to_vec())
        })
        .collect();
    let with_writer = stolon::throughput_with_a_writer(workload, &READERS, RUNS);
    println!("### Full hits per second, in millions, by number of readers\n");
    println!("| | 1 | 2 | 4 | 8 |\n|---|---|---|---|---|");
    print("", &alone);
    print(", with a writer", &with_writer);
    println!();
    plot(&alone, &with_writer).expect("the plot can be written");
}

fn print(suffix: &str, lines: &[Line]) {
    for (name, rates) in lines {
        let rates: Vec<String> = rates.iter().map(|rate| format!("{rate:.3}")).collect();
        println!("| {name}{suffix} | {} |", rates.join(" | "));
    }
}

fn plot(alone: &[Line], with_writer: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(PATH, (1100, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally(640);
    panel(&left, "Full hits of 8,192 tokens, readers alone", alone)?;
    panel(&right, "The same with a concurrent writer", with_writer)?;
    root.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    lines: &[Line],
) -> Result<(), Box<dyn std::error::Error>> {
    // Leaves room for the legend above the lines.
    let top = lines.iter().flat_map(|(_, rates)| rates).copied().fold(0.0, f64::max);
    let top = top * f64::powf(1.6, lines.len() as f64);
    // The numbers of readers are spaced evenly.
    let last = READERS.len() as f64 - 1.0;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(-0.1..last + 0.1, (0.05..top).log_scale())?;
    chart
        .configure_mesh()
        .x_labels(READERS.len())
        .x_label_formatter(&|x| READERS[x.round() as usize % READERS.len()].to_string())
        .y_label_formatter(&|y| format!("{y}"))
        .x_desc("readers")
        .y_desc("million lookups a second")
        .light_line_style(WHITE)
        .draw()?;
    for (index, (name, rates)) in lines.iter().enumerate() {
        let color = Palette99::pick(index).stroke_width(2);
        let points = rates.iter().enumerate().map(|(x, &rate)| (x as f64, rate));
        chart
            .draw_series(LineSeries::new(points.clone(), color))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
        chart.draw_series(points.map(|point| Circle::new(point, 3, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.2))
        .draw()?;
    Ok(())
}
