//! A chart of several runs, as inline SVG.

use std::fmt;
use std::ops::RangeInclusive;

use crate::scale::{Range, Scale};
use crate::series::{MAX_POINTS, Point, means, segments, thinned, window};
use crate::text::{Escaped, Short, Whole};

/// The space around the curves, for the labels.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// Number of bands that show their values under the pointer.
const BANDS: u64 = 80;
/// A curve with more points has no dots.
const MAX_DOTS: usize = 100;

/// A chart of several runs over the steps.
#[derive(Debug)]
pub(crate) struct Chart<'a> {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    /// The names of the runs.
    pub(crate) names: &'a [String],
    /// The first and the last step of the axis.
    pub(crate) steps: (u64, u64),
    pub(crate) range: Range,
    pub(crate) is_wide: bool,
    pub(crate) series: Vec<Series>,
}

/// A curve of a run.
#[derive(Debug)]
pub(crate) struct Series {
    /// The index of the run.
    pub(crate) run: usize,
    pub(crate) style: Style,
    pub(crate) points: Vec<Point>,
}

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// A line through all points.
    Line,
    /// A line through means, and a faint line through all points.
    Smoothed,
    /// A dashed line with dots.
    HeldOut,
}

impl Chart<'_> {
    fn width(&self) -> f64 {
        if self.is_wide { 1280.0 } else { 630.0 }
    }

    fn height(&self) -> f64 {
        if self.is_wide { 400.0 } else { 280.0 }
    }

    /// Describes the lines, if there is more than one kind.
    fn key(&self) -> String {
        let mut kinds = Vec::new();
        let of = |style| {
            self.series
                .iter()
                .filter(move |series| series.style == style)
        };
        let windows = of(Style::Smoothed).map(|series| window(series.points.len()));
        let (least, most) = (windows.clone().min(), windows.max());
        if let (Some(least), Some(most)) = (least, most)
            && most > 1
        {
            let means = if least == most {
                format!("{most} steps")
            } else {
                format!("{least} to {most} steps")
            };
            kinds.push("faint: each step".to_owned());
            kinds.push(format!("line: mean of {means}"));
        } else if of(Style::HeldOut).next().is_some() {
            kinds.push("line: training".to_owned());
        }
        if of(Style::HeldOut).next().is_some() {
            kinds.push("dashed: held-out text".to_owned());
        }
        kinds.join("; ")
    }
}

/// The figure, with its title.
impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.series.iter().flat_map(|series| &series.points);
        let frame = Frame {
            width: self.width(),
            height: self.height(),
            x: Scale::of_steps(self.steps.0, self.steps.1),
            y: Scale::of_values(values.map(|(_, value)| *value), self.range),
        };
        let class = if self.is_wide { " class=\"wide\"" } else { "" };
        write!(f, "<figure{class}><figcaption><b>{}</b> ", self.title)?;
        write!(f, "<span class=\"unit\">{}", self.unit)?;
        if frame.y.is_log() {
            f.write_str(", logarithmic")?;
        }
        writeln!(
            f,
            "</span><span class=\"key\">{}</span></figcaption>",
            self.key()
        )?;
        writeln!(
            f,
            "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} by step\">",
            frame.width, frame.height, self.title
        )?;
        frame.fmt_axes(f)?;
        for series in &self.series {
            series.fmt_into(f, &frame)?;
        }
        self.fmt_bands(f, &frame)?;
        f.write_str("</svg></figure>\n")
    }
}

impl Chart<'_> {
    /// Draws invisible bands that show the values of their steps under the pointer.
    fn fmt_bands(&self, f: &mut fmt::Formatter<'_>, frame: &Frame) -> fmt::Result {
        let (first, last) = self.steps;
        let each = (last - first) / BANDS + 1;
        let mut next = Some(first);
        f.write_str("<g class=\"bands\">")?;
        while let Some(start) = next {
            let end = start.saturating_add(each - 1).min(last);
            next = (end < last).then(|| end + 1);
            let mut values = String::new();
            for series in &self.series {
                if let Some(mean) = mean_in(&series.points, start..=end) {
                    let name = &self.names[series.run];
                    let kind = match series.style {
                        Style::HeldOut => " (held out)",
                        Style::Line | Style::Smoothed => "",
                    };
                    values.push_str(&format!("\n{}{kind}: {}", Escaped(name), Short(mean)));
                }
            }
            if values.is_empty() {
                continue;
            }
            let (left, right) = (frame.left_of(start), frame.left_of(end.saturating_add(1)));
            write!(
                f,
                "<rect x=\"{left:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"><title>",
                right - left,
                frame.bottom() - TOP
            )?;
            if start == end {
                write!(f, "step {}", Whole(start))?;
            } else {
                write!(f, "mean of steps {} to {}", Whole(start), Whole(end))?;
            }
            write!(f, "{values}</title></rect>")?;
        }
        f.write_str("</g>\n")
    }
}

impl Series {
    fn fmt_into(&self, f: &mut fmt::Formatter<'_>, frame: &Frame) -> fmt::Result {
        let run = self.run;
        write!(
            f,
            "<g class=\"run run-{run}\" style=\"--c:var(--run-{run})\">"
        )?;
        let window = window(self.points.len());
        let is_smoothed = self.style == Style::Smoothed && window > 1;
        let class = match self.style {
            Style::HeldOut => "held-out",
            Style::Line | Style::Smoothed => "line",
        };
        // A long series with many gaps must not have more points than a series without gaps.
        let segments = segments(&self.points);
        let num_points: usize = segments.iter().map(|segment| segment.len()).sum();
        let is_long = num_points > MAX_POINTS && segments.len() > MAX_POINTS / 4;
        let joined: Vec<Point> = segments.concat();
        let segments = if is_long {
            vec![joined.as_slice()]
        } else {
            segments
        };
        for segment in &segments {
            let class = if is_smoothed { "faint" } else { class };
            frame.fmt_line(f, class, &thinned(segment))?;
        }
        if is_smoothed {
            frame.fmt_line(f, class, &means(&joined, window))?;
        }
        if self.style == Style::HeldOut && num_points <= MAX_DOTS {
            for point in &joined {
                frame.fmt_dot(f, *point)?;
            }
        }
        f.write_str("</g>\n")
    }
}

/// The area of a chart, and its axes.
struct Frame {
    width: f64,
    height: f64,
    x: Scale,
    y: Scale,
}

impl Frame {
    fn bottom(&self) -> f64 {
        self.height - BOTTOM
    }

    fn right(&self) -> f64 {
        self.width - RIGHT
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + self.x.position(step) * (self.right() - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom() - self.y.position(value) * (self.bottom() - TOP)
    }

    /// Returns the position in the middle between a step and the step before it.
    fn left_of(&self, step: u64) -> f64 {
        self.x(step as f64 - 0.5)
    }

    fn fmt_axes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bottom, right) = (self.bottom(), self.right());
        f.write_str("<g class=\"axes\">")?;
        for (value, label) in self.y.ticks(6) {
            let y = self.y(value);
            write!(
                f,
                "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
            )?;
            let (x, y) = (LEFT - 8.0, y + 4.0);
            write!(f, "<text class=\"y\" x=\"{x}\" y=\"{y:.1}\">{label}</text>")?;
        }
        for step in self.x.whole_ticks((self.width / 70.0) as usize) {
            let (x, y) = (self.x(step as f64), bottom + 17.0);
            let end = bottom + 4.0;
            write!(
                f,
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{end}\"/>"
            )?;
            write!(f, "<text x=\"{x:.1}\" y=\"{y}\">{}</text>", Whole(step))?;
        }
        write!(
            f,
            "<line class=\"base\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>"
        )?;
        let (x, y) = ((LEFT + right) / 2.0, self.height - 6.0);
        writeln!(
            f,
            "<text class=\"axis\" x=\"{x}\" y=\"{y}\">step</text></g>"
        )
    }

    /// Draws a line, or a dot if there is only one point.
    fn fmt_line(&self, f: &mut fmt::Formatter<'_>, class: &str, points: &[Point]) -> fmt::Result {
        if let [point] = points {
            return self.fmt_dot(f, *point);
        }
        write!(f, "<polyline class=\"{class}\" points=\"")?;
        for (index, (step, value)) in points.iter().enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(
                f,
                "{space}{:.1},{:.1}",
                self.x(*step as f64),
                self.y(*value)
            )?;
        }
        f.write_str("\"/>")
    }

    fn fmt_dot(&self, f: &mut fmt::Formatter<'_>, (step, value): Point) -> fmt::Result {
        let (x, y) = (self.x(step as f64), self.y(value));
        write!(f, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>")
    }
}

/// Returns the mean of the finite values in a range of steps, if there are any.
fn mean_in(points: &[Point], steps: RangeInclusive<u64>) -> Option<f64> {
    let start = points.partition_point(|(step, _)| step < steps.start());
    let end = points.partition_point(|(step, _)| step <= steps.end());
    let values = points[start..end].iter().map(|(_, value)| *value);
    let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    let count = values.len() as f64;
    (!values.is_empty()).then(|| values.iter().map(|value| value / count).sum())
}
