//! Axes: from values to positions, and the ticks between.

/// The values of an axis, from its beginning to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
}

/// How the values of a chart fill its height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    /// From 0 to the largest value.
    FromZero,
    /// From the smallest to the largest value; logarithmic if they are far apart.
    Fit,
}

/// Values are drawn logarithmically if the largest is more than this many times the smallest.
const FAR_APART: f64 = 100.0;
/// Room above and below the values, as a part of the axis.
const MARGIN: f64 = 0.05;

impl Scale {
    /// Returns an axis of steps.
    pub(crate) fn of_steps(first: u64, last: u64) -> Self {
        let low = first as f64;
        // The largest steps are not followed by a different number.
        let next = (low + 1.0).max(low.next_up());
        Self {
            low,
            high: next.max(last as f64),
            is_log: false,
        }
    }

    /// Returns an axis for these values, of which only the finite ones count.
    pub(crate) fn of_values(values: impl Iterator<Item = f64>, range: Range) -> Self {
        let bounds = (f64::INFINITY, f64::NEG_INFINITY);
        let finite = values.filter(|value| value.is_finite());
        let (low, high) = finite.fold(bounds, |(low, high), value| {
            (low.min(value), high.max(value))
        });
        if low > high {
            return Self::linear(0.0, 1.0);
        }
        match range {
            Range::FromZero if low >= 0.0 => {
                let high = if high > 0.0 {
                    high * (1.0 + MARGIN)
                } else {
                    1.0
                };
                Self::linear(0.0, high)
            }
            Range::Fit if low > 0.0 && high / low > FAR_APART => Self {
                is_log: true,
                ..Self::linear(low * (1.0 - MARGIN), high * (1.0 + MARGIN))
            },
            Range::FromZero | Range::Fit => {
                // A flat line also needs some height. Half of the difference cannot overflow.
                let half = (high / 2.0 - low / 2.0).max(0.01 * high.abs()).max(1e-12);
                let margin = 2.0 * MARGIN * half;
                Self::linear(low - margin, high + margin)
            }
        }
    }

    /// Returns a linear axis. The largest numbers have no room for a margin.
    fn linear(low: f64, high: f64) -> Self {
        const LARGEST: f64 = 1e300;
        Self {
            low: low.clamp(-LARGEST, LARGEST),
            high: high.clamp(-LARGEST, LARGEST),
            is_log: false,
        }
    }

    pub(crate) fn is_log(&self) -> bool {
        self.is_log
    }

    /// Returns the position of a value, from 0 at the beginning of the axis to 1 at its end.
    pub(crate) fn position(&self, value: f64) -> f64 {
        let position = if self.is_log {
            (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        position.clamp(0.0, 1.0)
    }

    /// Returns about `count` values for ticks, and their labels.
    pub(crate) fn ticks(&self, count: usize) -> Vec<(f64, String)> {
        if self.is_log {
            return self.powers_of_ten(count);
        }
        let step = round_step((self.high - self.low) / count as f64);
        let first = (self.low / step).ceil();
        let numbers = (0..=2 * count).map(|index| first + index as f64);
        let values = numbers.map(|number| number * step);
        let largest = self.low.abs().max(self.high.abs());
        let label = |value: f64| tick_label(value, step, largest);
        values
            .take_while(|value| *value <= self.high)
            .map(|value| (value, label(value)))
            .collect()
    }

    /// Returns at most about `count` whole numbers for ticks.
    pub(crate) fn whole_ticks(&self, count: usize) -> Vec<u64> {
        let ticks = self.ticks(count).into_iter();
        let whole = ticks.filter(|(value, _)| value.fract() == 0.0);
        whole.map(|(value, _)| value as u64).collect()
    }

    fn powers_of_ten(&self, count: usize) -> Vec<(f64, String)> {
        let first = self.low.log10().ceil() as i32;
        let last = self.high.log10().floor() as i32;
        let every = ((last - first) as usize / count + 1) as i32;
        let exponents = (first..=last).filter(|exponent| (exponent - first) % every == 0);
        let value = |exponent: i32| 10f64.powi(exponent);
        exponents
            .map(|exponent| match exponent {
                -3..=4 => (value(exponent), value(exponent).to_string()),
                _ => (value(exponent), format!("1e{exponent}")),
            })
            .collect()
    }
}

/// Returns 1, 2 or 5 times a power of ten, at least as large as `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factors = [1.0, 2.0, 5.0];
    let factor = factors.into_iter().find(|factor| factor * power >= step);
    factor.unwrap_or(10.0) * power
}

fn tick_label(value: f64, step: f64, largest: f64) -> String {
    if !(1e-3..1e7).contains(&largest) {
        let value = if value.abs() < step / 2.0 { 0.0 } else { value };
        let digits = (largest.log10().floor() - step.log10().floor()).max(0.0);
        if value == 0.0 {
            return "0".to_owned();
        }
        return format!("{value:.*e}", digits as usize);
    }
    let digits = (-step.log10().floor()).max(0.0);
    let text = format!("{value:.*}", digits as usize);
    if text.trim_start_matches(['-', '0', '.']).is_empty() {
        "0".to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, count: usize) -> Vec<String> {
        scale
            .ticks(count)
            .into_iter()
            .map(|(_, label)| label)
            .collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        let scale = |values: &[f64], range| Scale::of_values(values.iter().copied(), range);
        let fit = scale(&[2.0, 5.5, f64::NAN], Range::Fit);
        assert_eq!(labels(fit, 5), ["2", "3", "4", "5"]);
        let rates = scale(&[2e-3, 1e-3], Range::FromZero);
        assert_eq!(labels(rates, 4), ["0", "0.001", "0.002"]);
        let small = scale(&[2e-5], Range::FromZero);
        assert_eq!(labels(small, 4), ["0", "1e-5", "2e-5"]);
        let steps = Scale::of_steps(0, 3);
        assert_eq!(steps.whole_ticks(8), [0, 1, 2, 3]);
        for step in [0, 1 << 53, u64::MAX] {
            let position = Scale::of_steps(step, step).position(step as f64);
            assert_eq!(position, 0.0, "{step}");
        }
    }

    #[test]
    fn values_far_apart_have_a_logarithmic_axis() {
        let scale = Scale::of_values([0.5, 5000.0].into_iter(), Range::Fit);
        assert!(scale.is_log());
        assert_eq!(labels(scale, 5), ["1", "10", "100", "1000"]);
        assert!((scale.position(50.0) - 0.5).abs() < 1e-3);
    }

    #[test]
    fn an_axis_has_some_height_for_any_values() {
        for values in [
            &[][..],
            &[0.0],
            &[3.0, 3.0],
            &[-1e308, 1e308],
            &[1e-320, 1e308],
            &[f64::NAN, f64::INFINITY],
        ] {
            for range in [Range::FromZero, Range::Fit] {
                let scale = Scale::of_values(values.iter().copied(), range);
                for value in values.iter().copied().filter(|value| value.is_finite()) {
                    let position = scale.position(value);
                    assert!((0.0..=1.0).contains(&position), "{values:?} {range:?}");
                }
                assert!(scale.ticks(5).len() <= 11, "{values:?} {range:?}");
            }
        }
    }
}
