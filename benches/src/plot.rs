//! Line plots, written as SVG.

use std::path::Path;

use plotters::coord::ranged1d::ValueFormatter;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// One line of a plot.
#[derive(Clone, Debug)]
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// The points `(x, y)`, ascending in x.
    pub points: Vec<(f64, f64)>,
}

/// The title of a plot and the labels of its axes.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    /// Title above the plot.
    pub title: &'a str,
    /// Label of the x axis.
    pub x: &'a str,
    /// Label of the y axis.
    pub y: &'a str,
}

static COLORS: [RGBColor; 5] = [
    RGBColor(120, 120, 120),
    RGBColor(31, 119, 180),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
];

/// Draws lines. With `log_x` the x axis is logarithmic and begins at the smallest positive x.
///
/// # Errors
/// When the file cannot be written.
pub fn lines(path: &Path, labels: Labels<'_>, lines: &[Line], log_x: bool) -> anyhow::Result<()> {
    let root = SVGBackend::new(path, (820, 420)).into_drawing_area();
    let points = || lines.iter().flat_map(|line| &line.points);
    let x_max = points().map(|&(x, _)| x).fold(1.0, f64::max);
    let x_min = points().map(|&(x, _)| x).filter(|&x| x > 0.0).fold(x_max, f64::min);
    let y_max = points().map(|&(_, y)| y).fold(f64::MIN_POSITIVE, f64::max) * 1.05;
    root.fill(&WHITE)?;
    let mut builder = ChartBuilder::on(&root);
    builder
        .caption(labels.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56);
    if log_x {
        let mut chart = builder.build_cartesian_2d((x_min..x_max).log_scale(), 0.0..y_max)?;
        draw(&mut chart, labels, lines)?;
    } else {
        let mut chart = builder.build_cartesian_2d(0.0..x_max, 0.0..y_max)?;
        draw(&mut chart, labels, lines)?;
    }
    root.present()?;
    Ok(())
}

fn draw<'a, X>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, RangedCoordf64>>,
    labels: Labels<'_>,
    lines: &[Line],
) -> anyhow::Result<()>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    // The light lines of the mesh are transparent, because a logarithmic axis draws more of them
    // than the configured number.
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(labels.x).y_desc(labels.y).light_line_style(TRANSPARENT).draw()?;
    for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), color.stroke_width(2)))?
            .label(&line.name)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}
