//! The drawing of the loss curve.

use std::error::Error;

use plotters::prelude::*;

const SIZE: (u32, u32) = (800, 480);
/// Each point of the line is a mean over about `losses.len() / MEANS` losses. A thin line below it shows every loss.
const MEANS: usize = 25;

/// Draws an SVG with the losses of the steps from `first_step` on, and the evaluations, if there are any.
pub(crate) fn draw(first_step: usize, losses: &[f64], eval_losses: &[(usize, f64)]) -> String {
    let points: Vec<(usize, f64)> = (first_step..).zip(losses.iter().copied()).collect();
    let mut svg = String::new();
    // Drawing into memory only fails if a picture makes no sense. The picture then has no lines.
    if draw_into(&mut svg, &finite(&points), &finite(eval_losses)).is_err() {
        svg.clear();
        let _ = SVGBackend::with_string(&mut svg, SIZE)
            .into_drawing_area()
            .present();
    }
    svg
}

fn draw_into(
    svg: &mut String,
    losses: &[(usize, f64)],
    eval_losses: &[(usize, f64)],
) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let values = losses.iter().chain(eval_losses).map(|(_, loss)| *loss);
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| {
        (low.min(loss), high.max(loss))
    });
    // Without any losses, the frame is still drawn.
    let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
    // A flat line also needs some height.
    let margin = (0.05 * (high - low)).max(0.01);
    let steps = || losses.iter().chain(eval_losses).map(|(step, _)| *step);
    let first_step = steps().min().unwrap_or(0);
    let last_step = steps().max().unwrap_or(0).max(first_step + 1);
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(first_step..last_step, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .x_desc("step")
        .y_desc("loss (nats per token)")
        .draw()?;
    let steps_of_mean = losses.len() / MEANS;
    let label = match steps_of_mean {
        0 | 1 => "training".to_owned(),
        steps => format!("training, mean of {} steps", 2 * (steps / 2) + 1),
    };
    if steps_of_mean > 1 {
        let each = BLUE.mix(0.25).stroke_width(1);
        chart.draw_series(LineSeries::new(losses.iter().copied(), each))?;
    }
    let mean = LineSeries::new(smoothed(losses, steps_of_mean / 2), BLUE.stroke_width(2));
    chart
        .draw_series(mean)?
        .label(label)
        .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], BLUE));
    if !eval_losses.is_empty() {
        let line = LineSeries::new(eval_losses.iter().copied(), RED.stroke_width(2).filled());
        chart
            .draw_series(line.point_size(3))?
            .label("held out")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], RED));
    }
    chart
        .configure_series_labels()
        .label_font(("sans-serif", 13))
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}

/// Returns, for each loss, the mean of this loss and up to `reach` losses on each side. Each mean includes at most as
/// many later losses as earlier ones, because the first losses fall fast.
fn smoothed(losses: &[(usize, f64)], reach: usize) -> Vec<(usize, f64)> {
    let mean = |(index, &(step, _)): (usize, &(usize, f64))| {
        let before = reach.min(index);
        let after = before.min(losses.len() - 1 - index);
        let near = &losses[index - before..=index + after];
        let sum: f64 = near.iter().map(|(_, loss)| loss).sum();
        (step, sum / near.len() as f64)
    };
    losses.iter().enumerate().map(mean).collect()
}

fn finite(points: &[(usize, f64)]) -> Vec<(usize, f64)> {
    points
        .iter()
        .copied()
        .filter(|(_, loss)| loss.is_finite())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{draw, smoothed};

    #[test]
    fn smoothing_takes_the_mean_of_neighboring_losses() {
        let losses = [(3, 5.0), (4, 1.0), (5, 3.0), (6, 2.0)];
        let means = [(3, 5.0), (4, 3.0), (5, 2.75), (6, 2.0)];
        assert_eq!(smoothed(&losses, 2), means);
        assert_eq!(smoothed(&losses, 0), losses);
        let svg = draw(0, &vec![2.0; 100], &[]);
        assert!(svg.contains("mean of 5 steps"), "{svg}");
    }

    #[test]
    fn steps_count_from_the_beginning_of_the_run() {
        let svg = draw(1000, &[5.0, 4.0, 3.0], &[(1002, 3.5)]);
        assert!(svg.contains("1000") || svg.contains("1001"), "{svg}");
    }

    #[test]
    fn any_losses_make_a_complete_picture() {
        for losses in [&[5.5, 4.0, 3.0][..], &[2.0], &[1.0, 1.0], &[f64::NAN], &[]] {
            let svg = draw(0, losses, &[(0, 3.5)]);
            assert!(
                svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
                "{losses:?}"
            );
        }
        assert!(draw(7, &[f64::NAN], &[]).trim_end().ends_with("</svg>"));
    }
}
