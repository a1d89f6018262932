//! A picture of the ratios of all pairs.

use std::error::Error;

use plotters::prelude::*;

use crate::report::{Ratio, Summary};

const WIDTH: u32 = 800;
const ROW: u32 = 44;

/// Draws an SVG with a row for each case: a point for each pair, a line for the median, and a band for its interval.
pub(crate) fn draw(cases: &[Summary]) -> String {
    let rows: Vec<(&str, &Ratio)> = cases
        .iter()
        .filter_map(|case| Some((case.name.as_str(), case.ratio.as_ref()?)))
        .collect();
    let size = (WIDTH, 90 + ROW * rows.len().max(1) as u32);
    let mut svg = String::new();
    // Drawing into memory fails only if the picture makes no sense. It then stays without rows.
    if draw_into(&mut svg, size, &rows).is_err() {
        svg.clear();
        let _ = SVGBackend::with_string(&mut svg, size)
            .into_drawing_area()
            .present();
    }
    svg
}

fn draw_into(
    svg: &mut String,
    size: (u32, u32),
    rows: &[(&str, &Ratio)],
) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, size).into_drawing_area();
    area.fill(&WHITE)?;
    let ratios = || rows.iter().flat_map(|(_, ratio)| ratio.all.iter().copied());
    let low = ratios().fold(0.9, f64::min) - 0.05;
    let high = ratios().fold(1.1, f64::max) + 0.05;
    let height = rows.len() as f64;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .margin_left(150)
        .x_label_area_size(40)
        .build_cartesian_2d(low..high, 0.0..height.max(1.0))?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .x_desc("tokens per second, ours over PyTorch's")
        .draw()?;
    chart.draw_series([PathElement::new(
        [(1.0, 0.0), (1.0, height.max(1.0))],
        BLACK.mix(0.6),
    )])?;
    for (row, (name, ratio)) in rows.iter().enumerate() {
        let middle = height - row as f64 - 0.5;
        let band = ratio.interval.map(|[from, to]| {
            let corners = [(from, middle - 0.28), (to, middle + 0.28)];
            Rectangle::new(corners, BLUE.mix(0.15).filled())
        });
        chart.draw_series(band)?;
        let line = [(ratio.median, middle - 0.28), (ratio.median, middle + 0.28)];
        chart.draw_series([PathElement::new(line, BLUE.stroke_width(2))])?;
        let points = ratio.all.iter();
        chart
            .draw_series(points.map(|at| Circle::new((*at, middle), 3, BLUE.mix(0.5).filled())))?;
        let (_, y) = chart.backend_coord(&(ratio.median, middle));
        let label = format!("{name}  {:.2}", ratio.median);
        area.draw(&Text::new(label, (12, y - 7), ("sans-serif", 13)))?;
    }
    area.present()?;
    Ok(())
}
