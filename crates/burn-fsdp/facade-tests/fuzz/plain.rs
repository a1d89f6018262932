//! One training run by plain Burn on one rank: the oracle.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};

use super::batch::joined;
use super::case::{Case, Limit, Norm};
use super::legs::{Accumulation, Engine, Leg};
use super::model::{Batch, Net, Plan};
use super::outcome::{Outcome, Params};

pub(crate) const RATE: f64 = 0.05;

/// Number of steps without overflow before the scale of the loss grows.
pub(crate) const GROWTH_INTERVAL: u32 = 2;

impl Case {
    /// Trains with plain Burn, with the mean of all batches' losses.
    pub(crate) fn plainly(&self) -> Outcome {
        self.plainly_nudged(0)
    }

    /// Trains with plain Burn, as [`plainly`](Self::plainly) except for rounding. Parameters differ in the last bits of
    /// the narrowest type (see [`Plan::init_nudged`]), and gradients come from a multiple of the loss and are then
    /// divided by it. A gradient that is zero except for rounding then has a different value.
    pub(crate) fn plainly_nudged(&self, nudge: u64) -> Outcome {
        let device = Device::flex().autodiff();
        let rounding = self.legs.iter().map(|leg| leg.halves().rounding());
        let rounding = rounding.fold(f32::EPSILON, f32::max);
        // Eight steps of a nudge are one step of the type, if it is a narrow one.
        let rounding = if rounding > f32::EPSILON {
            rounding / 8.0
        } else {
            rounding
        };
        let plan = self.plan.without_fields();
        let mut plainly = Plainly {
            case: self,
            net: plan.init_nudged(&device, nudge, rounding),
            optimizer: self.module_optimizer(&plan),
            plan,
            scale: None,
            nudge,
            device,
            outcome: Outcome::default(),
        };
        for (steps, leg) in self.legs() {
            plainly.leg(steps, leg);
        }
        let mut all = Params::default();
        // A module's statistics of batches show once its mode changes.
        drop(plainly.net.valid());
        plainly.net.visit(&mut all);
        Outcome {
            params: all.params,
            ..plainly.outcome
        }
    }
}

/// The current scale of losses.
#[derive(Debug, Clone, Copy)]
struct Scale {
    factor: f64,
    good_steps: u32,
}

struct Plainly<'a> {
    case: &'a Case,
    plan: Plan,
    net: Net,
    optimizer: ModuleOptimizer,
    scale: Option<Scale>,
    nudge: u64,
    device: Device,
    outcome: Outcome,
}

impl Plainly<'_> {
    fn leg(&mut self, steps: std::ops::Range<usize>, leg: &Leg) {
        if let Some(layer) = leg.switched {
            self.plan.switch(layer);
            self.net = self.plan.switched(self.net.clone());
        }
        self.plan.halves = leg.halves();
        // A leg without a scale saves none for the next one.
        let first = Scale {
            factor: 2_f64.powi(self.case.scale),
            good_steps: 0,
        };
        let is_scaled = self.plan.halves.are_scaled();
        self.scale = is_scaled.then(|| self.scale.unwrap_or(first));
        for step in steps.clone() {
            self.step(step, leg);
        }
        self.evaluate(steps.end, leg);
    }

    fn evaluate(&mut self, end: usize, leg: &Leg) {
        let net = leg.arrived(self.net.clone());
        let net = self.plan.halves.cast(&self.plan, net);
        let place = Case::place_of_evaluation(end);
        let batch = self.plan.batch(place, &self.device.clone().inner());
        let loss = self.plan.loss_by_hand(&net.valid().dropping(), batch);
        self.outcome.evaluated.push(loss.into_scalar::<f32>());
    }

    /// The micro-batches of each part of a step.
    fn batches(&self, step: usize, leg: &Leg) -> Vec<Vec<Batch>> {
        let micros = 0..self.case.micro_batches;
        let batch = |part, micro| {
            let place = Case::place(leg, step, part, micro);
            self.plan.batch(place, &self.device)
        };
        let parts = 0..leg.ranks.num_parts();
        match leg.engine {
            Engine::Placed(_) => {
                let all = |micro| joined(parts.clone().map(|part| batch(part, micro)));
                vec![micros.map(all).collect()]
            }
            _ => parts
                .map(|part| micros.clone().map(|micro| batch(part, micro)).collect())
                .collect(),
        }
    }

    fn step(&mut self, step: usize, leg: &Leg) {
        let parts = self.batches(step, leg);
        let number = parts.len();
        let has_running_states = self.plan.has_running_states();
        let mut loss = 0.0;
        let mut sum = GradientsParams::new();
        for (part, batches) in parts.into_iter().enumerate() {
            // The first rank's statistics are kept.
            let net = if part > 0 && has_running_states {
                self.copy()
            } else {
                self.net.clone()
            };
            let (of_part, gradients) = self.gradients(&net, batches, leg);
            loss += of_part / number as f32;
            sum = match part {
                0 => gradients,
                _ => added(&self.net, sum, gradients, None),
            };
        }
        let factor = 1.0 / number as f32;
        self.net.visit(&mut Each(&mut sum, |_: &[f32]| factor));
        self.outcome.losses.push(loss);
        let Some(mut gradients) = self.unscaled(sum) else {
            return;
        };
        if let Some(limit) = self.case.clip {
            clip_plainly(&self.net, &mut gradients, limit);
        }
        let rates = self.case.rates.of(step);
        self.net = self.optimizer.step(rates, self.net.clone(), gradients);
    }

    /// Returns a copy of the module that keeps separate statistics.
    fn copy(&self) -> Net {
        let net = self.plan.init(&self.device);
        net.load_record(self.net.clone().into_record())
    }

    /// Returns the mean loss of one rank, and its gradients as they arrive.
    fn gradients(&self, net: &Net, batches: Vec<Batch>, leg: &Leg) -> (f32, GradientsParams) {
        let halves = self.plan.halves;
        let number = batches.len() as f64;
        let scale = self.scale.map_or(1.0, |scale| scale.factor);
        let multiple = match (halves.are_scaled(), self.nudge) {
            (false, nudge) => 1.0 + 0.3 * nudge as f64,
            // Whether sums of f16 overflow depends on the order of addition, unless they are far from it. One order may
            // skip a step, and another only the step before it.
            (true, 1) => 4.0,
            (true, 2) => 0.25,
            (true, 3) => 2.0,
            (true, 4) => 0.5,
            (true, _) => 1.0,
        };
        let together = match &leg.engine {
            _ if !halves.are_used() => Accumulation::Joined,
            Engine::Eager(eager) => eager.accumulation,
            _ => Accumulation::Burn,
        };
        let is_compiled = !matches!(leg.engine, Engine::Eager(_));
        // Compiled steps take the mean of the accumulated gradients.
        let (before, after) = if is_compiled && together == Accumulation::Burn {
            (1.0, number)
        } else {
            (number, 1.0)
        };
        let loss_of = |cast: &Net, batch| self.plan.loss_by_hand(cast, batch) / before;
        let losses: Vec<_> = match together {
            // One cast of each parameter, whose gradients are accumulated.
            Accumulation::Joined => {
                let cast = halves.cast(&self.plan, leg.arrived(net.clone()));
                let losses = batches.into_iter().map(|batch| loss_of(&cast, batch));
                losses.reduce(|sum, loss| sum + loss).into_iter().collect()
            }
            // Burn consumes the graph of a loss in its backward, so losses share nothing but the parameters.
            _ => {
                let casts = batches.into_iter().map(|batch| {
                    let cast = halves.cast(&self.plan, leg.arrived(net.clone()));
                    loss_of(&cast, batch)
                });
                casts.collect()
            }
        };
        let mut total = 0.0;
        let mut sum = GradientsParams::new();
        for loss in losses {
            total += loss.clone().into_scalar::<f32>() / after as f32;
            let gradients = (loss * (multiple * scale)).backward();
            let gradients = GradientsParams::from_grads(gradients, net);
            let gradients = self.travelled(net, gradients);
            let held = (together == Accumulation::NoSync).then_some(&self.plan);
            sum = added(net, sum, gradients, held);
        }
        let factor = (1.0 / (multiple * after)) as f32;
        net.visit(&mut Each(&mut sum, |_: &[f32]| factor));
        (total, sum)
    }

    /// Returns gradients of `net` in the form that they have after travelling.
    fn travelled(&self, net: &Net, gradients: GradientsParams) -> GradientsParams {
        if self.plan.halves.are_used() {
            added(net, GradientsParams::new(), gradients, Some(&self.plan))
        } else {
            gradients
        }
    }

    /// Returns gradients without the scale of the loss, or nothing where they overflow.
    fn unscaled(&mut self, mut gradients: GradientsParams) -> Option<GradientsParams> {
        let Some(scale) = &mut self.scale else {
            return Some(gradients);
        };
        let mut is_finite = true;
        self.net.visit(&mut Each(&mut gradients, |values: &[f32]| {
            is_finite &= values.iter().all(|value| value.is_finite());
            1.0
        }));
        if !is_finite {
            *scale = Scale {
                factor: scale.factor / 2.0,
                good_steps: 0,
            };
            return None;
        }
        let factor = scale.factor.recip() as f32;
        self.net
            .visit(&mut Each(&mut gradients, |_: &[f32]| factor));
        scale.good_steps += 1;
        if scale.good_steps == GROWTH_INTERVAL {
            *scale = Scale {
                factor: scale.factor * 2.0,
                good_steps: 0,
            };
        }
        Some(gradients)
    }
}

/// Returns the sum of gradients of `net`. With a plan, each is in the type in which it is sent.
fn added(
    net: &Net,
    sum: GradientsParams,
    next: GradientsParams,
    travels: Option<&Plan>,
) -> GradientsParams {
    let mut adding = Adding {
        goes_on: !sum.is_empty(),
        sum,
        next,
        travels,
        path: Vec::new(),
    };
    net.visit(&mut adding);
    adding.sum
}

struct Adding<'a> {
    /// True if there are already gradients, for all parameters that have any.
    goes_on: bool,
    sum: GradientsParams,
    next: GradientsParams,
    travels: Option<&'a Plan>,
    path: Vec<String>,
}

impl ModuleVisitor for Adding<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(next) = self.next.remove::<D>(param.id) else {
            return;
        };
        let sum = match self.sum.remove::<D>(param.id) {
            Some(sum) => sum + next,
            // A copy made by a record has gradients for parameters that Burn's map of the value leaves without them.
            None if self.goes_on => return,
            None => next,
        };
        let sum = match self.travels {
            Some(plan) => {
                let travels = plan.halves.travels(plan, &self.path);
                sum.cast(travels).cast(FloatDType::F32)
            }
            None => sum,
        };
        self.sum.register(param.id, sum);
    }
}

/// Multiplies each gradient by the function's result for its values.
struct Each<'a, F>(&'a mut GradientsParams, F);

impl<F: FnMut(&[f32]) -> f32> ModuleVisitor for Each<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.0.remove::<D>(param.id) else {
            return;
        };
        let values: Vec<f32> = gradient.to_data().try_to_vec().expect("32-bit floats");
        let factor = (self.1)(&values);
        self.0.register(param.id, gradient * factor);
    }
}

/// Scales all gradients by their common norm.
fn clip_plainly(net: &Net, gradients: &mut GradientsParams, limit: Limit) {
    let mut norm = 0.0_f64;
    net.visit(&mut Each(gradients, |values: &[f32]| {
        for value in values.iter().map(|value| f64::from(value.abs())) {
            match limit.norm {
                Norm::Two => norm += value * value,
                Norm::One => norm += value,
                Norm::Infinity => norm = norm.max(value),
            }
        }
        1.0
    }));
    if let Norm::Two = limit.norm {
        norm = norm.sqrt();
    }
    let factor = (limit.max_norm / (norm + 1e-6)).min(1.0);
    net.visit(&mut Each(gradients, |_: &[f32]| factor as f32));
}
