//! The curves of a chart: which values of a run they show, and which of their points are drawn.

use crate::line::StepLine;
use crate::run::Run;

/// A step and a value.
pub(crate) type Point = (u64, f64);

/// A longer curve is drawn with at most this many points.
pub(crate) const MAX_POINTS: usize = 1200;
/// Each point of a mean is over about `points.len() / MEANS` points.
const MEANS: usize = 25;

/// Returns the steps with a value. A value may be not finite.
pub(crate) fn points(run: &Run, value: impl Fn(&StepLine) -> Option<f64>) -> Vec<Point> {
    let points = run.steps.iter();
    points
        .filter_map(|line| Some((line.step, value(line)?)))
        .collect()
}

/// Divides a curve where values are not finite.
pub(crate) fn segments(points: &[Point]) -> Vec<&[Point]> {
    let finite = points.split(|(_, value)| !value.is_finite());
    finite.filter(|segment| !segment.is_empty()).collect()
}

/// Returns at most [`MAX_POINTS`] points with the shape of the curve: the lowest and the highest of each group of
/// neighbors, in their order.
pub(crate) fn thinned(points: &[Point]) -> Vec<Point> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let groups = points.chunks(points.len().div_ceil(MAX_POINTS / 2));
    let extremes = groups.flat_map(|group| {
        let by_value = |one: &&Point, other: &&Point| one.1.total_cmp(&other.1);
        let lowest = group.iter().min_by(by_value);
        let highest = group.iter().max_by(by_value);
        let mut both: Vec<Point> = lowest.into_iter().chain(highest).copied().collect();
        both.sort_by_key(|(step, _)| *step);
        both.dedup();
        both
    });
    extremes.collect()
}

/// Returns the number of points in a mean, which is odd; 1 if the curve is too short for means.
pub(crate) fn window(num_points: usize) -> usize {
    2 * (num_points / MEANS / 2) + 1
}

/// Returns means over `window` points, or over fewer near the ends, around at most [`MAX_POINTS`] points.
///
/// Near the beginning, where losses fall fast, a mean has as many points on both sides. Near the end, where they do not,
/// it has all points that there are, so the curve does not end at a single noisy value.
pub(crate) fn means(points: &[Point], window: usize) -> Vec<Point> {
    let Some(last) = points.len().checked_sub(1) else {
        return Vec::new();
    };
    let every = points.len().div_ceil(MAX_POINTS - 1);
    let centers = (0..last).step_by(every).chain([last]);
    let mean = |center: usize| {
        let reach = (window / 2).min(center);
        let near = &points[center - reach..=(center + reach).min(last)];
        let (values, count) = (near.iter().map(|(_, value)| *value), near.len() as f64);
        let sum: f64 = values.clone().sum();
        // A sum of large values may overflow.
        let mean = if sum.is_finite() {
            sum / count
        } else {
            values.map(|value| value / count).sum()
        };
        (points[center].0, mean)
    };
    centers.map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_extremes() {
        let mut points: Vec<Point> = (0..100_000).map(|step| (step, 1.0)).collect();
        points[5_000].1 = 9.0;
        points[60_000].1 = -9.0;
        let thin = thinned(&points);
        assert!(
            thin.len() <= MAX_POINTS && thin.len() >= MAX_POINTS / 4,
            "{}",
            thin.len()
        );
        assert!(thin.contains(&(5_000, 9.0)) && thin.contains(&(60_000, -9.0)));
        assert!(thin.is_sorted_by_key(|(step, _)| *step));
        assert_eq!(thinned(&points[..MAX_POINTS]), points[..MAX_POINTS]);
    }

    #[test]
    fn means_are_of_neighbors() {
        let points = [(3, 5.0), (4, 1.0), (5, 3.0), (6, 2.0)];
        assert_eq!(means(&points, 3), [(3, 5.0), (4, 3.0), (5, 2.0), (6, 2.5)]);
        assert_eq!(means(&points, 1), points);
        // A value that is far too large spoils no means that it is not part of.
        let mut spike = vec![(0, 2.0); 100];
        spike[1].1 = 1e300;
        assert_eq!(means(&spike, 5)[50..], spike[50..]);
        let long: Vec<Point> = (0..10_001).map(|step| (step, 1.0)).collect();
        let means = means(&long, window(long.len()));
        assert!(means.len() <= MAX_POINTS && means.last() == long.last());
        assert_eq!(
            [window(0), window(49), window(50), window(1000)],
            [1, 1, 3, 41]
        );
    }

    #[test]
    fn curves_have_gaps_where_values_are_not_finite() {
        let points = [
            (0, f64::NAN),
            (1, 1.0),
            (2, 2.0),
            (3, f64::INFINITY),
            (4, 4.0),
        ];
        assert_eq!(segments(&points), [&points[1..3], &points[4..]]);
    }
}
