//! The outcome of a training run, and whether two outcomes differ by more than rounding.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::case::Case;

/// The losses of the steps, the losses of evaluations after the legs, and the final parameters by path.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) losses: Vec<f32>,
    pub(crate) evaluated: Vec<f32>,
    pub(crate) params: BTreeMap<String, Vec<f32>>,
}

/// The number of cases, and of those in which plain Burn was run to measure the effect of rounding.
static ALL: AtomicUsize = AtomicUsize::new(0);
static ASKED: AtomicUsize = AtomicUsize::new(0);

/// Returns a text with the number of cases that agreed without regard to rounding. Counts the cases of all
/// tests.
pub(crate) fn tightness() -> String {
    let [all, asked] = [&ALL, &ASKED].map(|number| number.load(Ordering::Relaxed));
    format!("{} of {all} cases agree to 2e-5", all - asked)
}

impl Case {
    /// Returns a description of a difference between `got` and `want` that is more than rounding, if there is
    /// one.
    pub(crate) fn difference(&self, got: &Outcome, want: &Outcome) -> Option<String> {
        ALL.fetch_add(1, Ordering::Relaxed);
        // Where halves are nudged by a half of their last bit, they round by as much.
        let factor = if self.is_halved() { 4.0 } else { 30.0 };
        self.beyond(got, want, &[], factor).and_then(|_| {
            ASKED.fetch_add(1, Ordering::Relaxed);
            // The effect of rounding on a number depends on the model. Some models amplify it a thousandfold, and
            // gradients that are zero except for rounding show only in some of these.
            let mut nudged: Vec<_> = (1..=6).map(|nudge| self.plainly_nudged(nudge)).collect();
            self.beyond(got, want, &nudged, factor).and_then(|_| {
                // A few draws may miss the effects of rounding. Halves round far, and an optimizer may act differently
                // on either side of a number near zero. (Adafactor's first step of a key whose gradient nearly cancels
                // made 8e-4 in one of sixty draws, and at most 2e-5 in all others.) With many draws, little more than
                // the largest difference counts as rounding.
                nudged.extend((7..=80).map(|nudge| self.plainly_nudged(nudge)));
                self.beyond(got, want, &nudged, factor.min(4.0))
            })
        })
    }

    fn is_halved(&self) -> bool {
        self.legs.iter().any(|leg| leg.halves().are_used())
    }

    /// As [`difference`](Self::difference), with known outcomes of parameters that differ by rounding. A multiple of
    /// their differences counts as rounding.
    fn beyond(
        &self,
        got: &Outcome,
        want: &Outcome,
        nudged: &[Outcome],
        factor: f32,
    ) -> Option<String> {
        let paths = |outcome: &Outcome| outcome.params.keys().cloned().collect::<Vec<_>>();
        if paths(got) != paths(want) {
            return Some(format!("saved {:?}, not {:?}", paths(got), paths(want)));
        }
        // Attention does not depend on a bias of its keys, whose gradient therefore consists only of rounding, and
        // the steps of these optimizers do not get smaller with the gradient.
        let is_noise = |path: &str| self.optimizer.ignores_size() && path.ends_with("key.bias");
        let params = want.params.iter().filter(|(path, _)| !is_noise(path));
        let params = params.map(|(path, want)| {
            let nudged = nudged.iter().map(|nudged| &nudged.params[path]).collect();
            (path.as_str(), &got.params[path], want, nudged)
        });
        let of_losses: Vec<_> = nudged.iter().map(|nudged| &nudged.losses).collect();
        let losses = ("losses", &got.losses, &want.losses, of_losses);
        let of_legs = nudged.iter().map(|nudged| &nudged.evaluated).collect();
        let evaluated = ("evaluations", &got.evaluated, &want.evaluated, of_legs);
        let mut all = [losses, evaluated].into_iter().chain(params);
        all.find_map(|(name, got, want, nudged)| {
            let same_len = got.len() == want.len();
            let scales = nudged.iter().map(|nudged| largest_difference(nudged, want));
            let scale = scales.fold(0.0, f32::max);
            let is_near = |(got, want): (&f32, &f32)| {
                // A number is near infinity only if rounding alone makes one of the other.
                let size = if want.is_finite() { want.abs() } else { 0.0 };
                let tolerance = 2e-5 * (1.0 + size) + factor * scale;
                // The last test also covers the case that one of them is not a number.
                got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= tolerance
            };
            let first = got.iter().zip(want).position(|pair| !is_near(pair));
            match (same_len, first) {
                (true, None) => None,
                (true, Some(i)) => Some(format!(
                    "{name}[{i}]: {}, plainly {}; {scale:e} by rounding",
                    got[i], want[i]
                )),
                (false, _) => Some(format!(
                    "{name}: {} elements, not {}",
                    got.len(),
                    want.len()
                )),
            }
        })
    }
}

fn largest_difference(one: &[f32], other: &[f32]) -> f32 {
    let differences = one
        .iter()
        .zip(other)
        .map(|(one, other)| (one - other).abs());
    differences.fold(0.0, f32::max)
}

/// Values by path.
#[derive(Default)]
pub(crate) struct Params {
    path: Vec<String>,
    pub(crate) params: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Params {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param
            .base()
            .into_data()
            .try_to_vec()
            .expect("32-bit floats");
        self.params.insert(self.path.join("."), values);
    }
}
