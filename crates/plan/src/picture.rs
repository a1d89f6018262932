//! An SVG of memory over the step.

use std::error::Error;

use plotters::prelude::*;

use crate::category::{Bytes, Category};

const SIZE: (u32, u32) = (900, 480);
/// Maximum number of points drawn. A longer series is divided into groups, and the largest point of each is drawn.
const MAX_POINTS: usize = 1500;
const GIB: f64 = (1u64 << 30) as f64;

/// Draws an SVG of bytes over the step, stacked by category, with the peak marked.
pub(crate) fn draw(title: &str, x_label: &str, series: &[Bytes]) -> String {
    let mut svg = String::new();
    // Drawing into a string fails only if the picture is invalid. The picture then stays empty.
    if draw_into(&mut svg, title, x_label, series).is_err() {
        svg.clear();
        let _ = SVGBackend::with_string(&mut svg, SIZE)
            .into_drawing_area()
            .present();
    }
    svg
}

fn draw_into(
    svg: &mut String,
    title: &str,
    x_label: &str,
    series: &[Bytes],
) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let points = thinned(series);
    let (peak_at, peak) = points.iter().fold((0, 0), |(at, most), (index, bytes)| {
        let total = bytes.total();
        if total > most {
            (*index, total)
        } else {
            (at, most)
        }
    });
    let (unit, per_unit) = unit(peak);
    let last = series.len().saturating_sub(1).max(1);
    let top = (peak as f64 / per_unit).max(1e-9) * 1.15;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .caption(title, ("sans-serif", 17))
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(0..last, 0.0..top)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .x_desc(x_label)
        .y_desc(format!("live tensor bytes ({unit})"))
        .draw()?;
    let mut below = vec![0u64; points.len()];
    for category in Category::ALL {
        let above: Vec<u64> = below
            .iter()
            .zip(&points)
            .map(|(below, (_, bytes))| below + bytes[category])
            .collect();
        if above != below {
            let upper = points.iter().zip(&above);
            let lower = points.iter().zip(&below).rev();
            let at = |((x, _), y): (&(usize, Bytes), &u64)| (*x, *y as f64 / per_unit);
            let outline: Vec<(usize, f64)> = upper.map(at).chain(lower.map(at)).collect();
            let color = color(category);
            chart
                .draw_series([Polygon::new(outline, color.filled())])?
                .label(category.as_str())
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled())
                });
        }
        below = above;
    }
    let height = peak as f64 / per_unit;
    chart
        .draw_series([Circle::new((peak_at, height), 4, BLACK.filled())])?
        .label(format!("peak: {height:.2} {unit} at {peak_at}"))
        .legend(|(x, y)| Circle::new((x + 6, y), 4, BLACK.filled()));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(("sans-serif", 13))
        .border_style(BLACK)
        .background_style(WHITE.mix(0.85))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Picks at most [`MAX_POINTS`] points, including the largest.
fn thinned(series: &[Bytes]) -> Vec<(usize, Bytes)> {
    let group = series.len().div_ceil(MAX_POINTS).max(1);
    let indexed: Vec<_> = series.iter().copied().enumerate().collect();
    indexed
        .chunks(group)
        .filter_map(|chunk| chunk.iter().rev().max_by_key(|(_, bytes)| bytes.total()))
        .copied()
        .collect()
}

fn unit(peak: u64) -> (&'static str, f64) {
    match peak {
        0..1_048_576 => ("KiB", 1024.0),
        1_048_576..1_073_741_824 => ("MiB", 1_048_576.0),
        _ => ("GiB", GIB),
    }
}

fn color(category: Category) -> RGBColor {
    match category {
        Category::Parameters => RGBColor(31, 87, 164),
        Category::OptimizerState => RGBColor(110, 156, 214),
        Category::Buffers => RGBColor(150, 150, 150),
        Category::Gradients => RGBColor(200, 60, 50),
        Category::FullParameters => RGBColor(120, 80, 160),
        Category::Activations => RGBColor(70, 150, 80),
        Category::Temporaries => RGBColor(240, 180, 70),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(parameters: u64, activations: u64) -> Bytes {
        Bytes {
            parameters,
            activations,
            ..Bytes::default()
        }
    }

    #[test]
    fn any_series_makes_a_complete_picture_with_its_peak() {
        let long: Vec<_> = (0..10_000)
            .map(|index| bytes(1 << 30, if index == 7777 { 3 << 30 } else { 0 }))
            .collect();
        let svg = draw("a step", "node", &long);
        assert!(svg.contains("peak: 4.00 GiB at 7777"), "{svg}");
        assert!(svg.contains("activations") && svg.trim_end().ends_with("</svg>"));
        for series in [&[][..], &[bytes(5, 0)]] {
            let svg = draw("a step", "node", series);
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        }
    }
}
