//! One training, by plain Burn on one rank and by the legs of a case.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_fsdp::checkpoint::{
    Checkpoints, GroupRendezvous, Region, SaveRequest, TrainingState, save_step,
};
use burn_fsdp::compile::passes::schedule::Options;
use burn_fsdp::compile::passes::{Bucket, Recompute, Units};
use burn_fsdp::compile::{DataParallel, Expand, Mode, restore_compiled, snapshot_compiled};
use burn_fsdp::{
    Error, LaunchConfig, Mesh, Placement, ProcessGroup, ProcessMesh, ShardPolicy, backward, catch,
    clip_grad_norm, fully_shard, launch, no_sync, resume, save,
};

use super::case::{Accumulation, Case, Compiled, Eager, Engine, Leg, Limit, Norm, Placed, Ranks};
use super::model::{Batch, Net};

const RATE: f64 = 0.05;

/// The losses of the steps, and the parameters after them by path.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    losses: Vec<f32>,
    params: BTreeMap<String, Vec<f32>>,
}

impl Case {
    /// Returns the batch of a rank in a step.
    fn batch(&self, step: usize, rank: usize, micro: usize, device: &Device) -> Batch {
        let number = (step * 8 + rank) * 4 + micro;
        self.plan.batch(number, device)
    }

    /// The steps of each leg, with the leg.
    fn legs(&self) -> impl Iterator<Item = (std::ops::Range<usize>, &Leg)> {
        self.legs.iter().scan(0, |next, leg| {
            let steps = *next..*next + leg.steps;
            *next = steps.end;
            Some((steps, leg))
        })
    }

    /// Trains with plain Burn, with the mean of all batches' losses.
    pub(crate) fn plainly(&self) -> Outcome {
        self.plainly_nudged(0)
    }

    /// Trains with plain Burn, as [`plainly`](Self::plainly) but for rounding: from parameters that differ in their last
    /// bits (see [`Plan::init_nudged`]), and with gradients of a multiple of the loss, which are then divided by it. A
    /// gradient that is zero but for rounding is another one then.
    fn plainly_nudged(&self, nudge: u64) -> Outcome {
        let device = Device::flex().autodiff();
        let mut net = self.plan.init_nudged(&device, nudge);
        let mut optimizer = self.optimizer.init();
        let mut losses = Vec::new();
        let mut plan = self.plan.clone();
        for (steps, leg) in self.legs() {
            if let Some(layer) = leg.switched {
                plan.switch(layer);
                net = plan.switched(net);
            }
            for step in steps {
                let of_parts = (0..self.micro_batches).flat_map(|micro| {
                    let parts = 0..leg.ranks.num_parts();
                    let batches = parts.map(|part| self.batch(step, part, micro, &device));
                    match leg.engine {
                        Engine::Placed(_) => vec![joined(batches)],
                        _ => batches.collect(),
                    }
                });
                let all: Vec<_> = of_parts.map(|batch| self.plan.loss(&net, batch)).collect();
                let number = all.len();
                let loss = all.into_iter().reduce(|sum, loss| sum + loss);
                let loss = loss.expect("one rank or more") / number as f64;
                losses.push(loss.clone().into_scalar::<f32>());
                let multiple = 1.0 + 0.3 * nudge as f64;
                let gradients = (loss * multiple).backward();
                let mut gradients = GradientsParams::from_grads(gradients, &net);
                if nudge > 0 {
                    net.visit(&mut Each(&mut gradients, |_: &[f32]| {
                        (1.0 / multiple) as f32
                    }));
                }
                if let Some(limit) = self.clip {
                    clip_plainly(&net, &mut gradients, limit);
                }
                net = optimizer.step(RATE, net, gradients);
            }
        }
        let mut all = Params::default();
        net.visit(&mut all);
        Outcome {
            losses,
            params: all.params,
        }
    }

    /// Trains by the legs, each of which goes on from a checkpoint of the one before.
    pub(crate) fn by_legs(&self) -> Result<Outcome, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut losses = Vec::new();
        let mut case = self.clone();
        for (steps, leg) in self.legs() {
            if let Some(layer) = leg.switched {
                case.plan.switch(layer);
            }
            // Of some operations, the proof by placements is refused by name.
            let proved = case.by_leg(leg, steps.clone(), folder.path(), true);
            let of_ranks = match proved {
                Err(error) if error.contains("cannot be proved") => {
                    case.by_leg(leg, steps, folder.path(), false)?
                }
                proved => proved?,
            };
            let ranks = of_ranks.len() as f32;
            losses.extend((0..leg.steps).map(|step| {
                let sum: f32 = of_ranks.iter().map(|losses| losses[step]).sum();
                sum / ranks
            }));
        }
        Ok(Outcome {
            losses,
            params: saved_params(folder.path()).map_err(|error| error.to_string())?,
        })
    }

    /// Returns each rank's losses. Plans are proved before they run, if asked for.
    fn by_leg(
        &self,
        leg: &Leg,
        steps: std::ops::Range<usize>,
        folder: &Path,
        proves: bool,
    ) -> Result<Vec<Vec<f32>>, String> {
        let (case, folder) = (self.clone(), folder.to_owned());
        let Leg { ranks, engine, .. } = leg.clone();
        let config = LaunchConfig::new(ranks.number()).deadline(Duration::from_secs(60));
        let of_ranks = launch(config, move |world| {
            let mesh = ranks.mesh(&world)?;
            let mode = match &engine {
                Engine::Eager(eager) => {
                    return case.eagerly(eager, &mesh, ranks, steps.clone(), &folder);
                }
                Engine::Compiled(compiled) => case.mode(compiled, &mesh, ranks)?,
                Engine::Placed(placed) => case.mode_of_placements(placed, &mesh, ranks),
            };
            let mode = match proves {
                true => mode.certified(),
                false => mode,
            };
            case.compiled(mode, &mesh, ranks, steps.clone(), &folder)
        });
        of_ranks.map_err(|error| format!("{leg:?}: {error}"))
    }

    fn eagerly(
        &self,
        eager: &Eager,
        mesh: &ProcessMesh,
        ranks: Ranks,
        steps: std::ops::Range<usize>,
        folder: &Path,
    ) -> Result<Vec<f32>, Error> {
        let world = mesh.world();
        let device = Device::flex().autodiff().gradient_checkpointing();
        let net = fully_shard(self.plan.init(&device), mesh, self.policy(eager, ranks))?;
        let resumed = resume(folder, net, self.optimizer.init(), mesh)?;
        let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
        let mut losses = Vec::new();
        let last = self.micro_batches - 1;
        for step in steps.clone() {
            let loss_of = |net: &Net, micro| {
                let batch = self.batch(step, world.rank(), micro, &device);
                let loss = catch(|| match eager.recomputes {
                    true => self.plan.loss_recomputed(net, batch),
                    false => self.plan.loss(net, batch),
                })?;
                Ok::<_, Error>(loss / self.micro_batches as f64)
            };
            let mut total = 0.0;
            let mut backward_of = |net: &Net, micro| {
                let loss = loss_of(net, micro)?;
                total += loss.clone().into_scalar::<f32>();
                Ok::<_, Error>(backward(loss, net)?)
            };
            let mut gradients = match eager.accumulation {
                Accumulation::Joined => {
                    let mut sum = loss_of(&net, 0)?;
                    for micro in 1..=last {
                        sum = sum + loss_of(&net, micro)?;
                    }
                    total += sum.clone().into_scalar::<f32>();
                    backward(sum, &net)?
                }
                Accumulation::NoSync => {
                    for micro in 0..last {
                        no_sync(&net, || backward_of(&net, micro))??;
                    }
                    backward_of(&net, last)?
                }
                Accumulation::Burn => {
                    let mut accumulator = GradientsAccumulator::new();
                    for micro in 0..=last {
                        accumulator.accumulate(&net, backward_of(&net, micro)?);
                    }
                    accumulator.grads()
                }
            };
            if let Some(limit) = self.clip {
                gradients = clip_grad_norm(&net, gradients, limit.clip())?.gradients;
            }
            losses.push(total);
            net = catch(|| optimizer.step(RATE, net, gradients))?;
        }
        save(folder, steps.end as u64, &net, &optimizer, mesh)?;
        Ok(losses)
    }

    fn policy(&self, eager: &Eager, ranks: Ranks) -> ShardPolicy {
        // A pattern that matches nothing is refused.
        let has_layer = |pattern: &&&str| **pattern != "head" || self.plan.has_head();
        let units = eager.units.iter().filter(has_layer).copied();
        let mut policy = ShardPolicy::new()
            .units(units)
            .strategy(eager.strategy)
            .cut(eager.cut)
            .whole_below(eager.whole_below)
            .prefetch(eager.prefetch)
            .reshard_root(eager.reshards_root)
            .audit(burn_fsdp::sharding::Audit::EveryStep);
        if eager.has_owners {
            policy = policy.one_owner(["**"]);
        }
        if let Ranks::Copies(_) = ranks {
            policy = policy.replicate_axis("replicate");
        }
        if eager.offloads {
            policy = policy.offload_to(Device::flex());
        }
        if eager.keeps_by_pairs && ranks == Ranks::Line(4) {
            policy = policy.reshard_after_forward_to(2);
        }
        policy
    }

    fn mode(&self, compiled: &Compiled, mesh: &ProcessMesh, ranks: Ranks) -> Result<Mode, Error> {
        let mode = match ranks {
            Ranks::Copies(_) => Mode::hybrid(mesh.clone(), "replicate", compiled.strategy)?,
            _ => Mode::data_parallel(mesh.world().clone(), compiled.strategy),
        };
        Ok(mode.options(self.options(compiled)))
    }

    fn mode_of_placements(&self, placed: &Placed, mesh: &ProcessMesh, ranks: Ranks) -> Mode {
        let options = Options::default()
            .fuse(placed.fuse)
            .optimizer(placed.place)
            .clip_grad_norm(self.clip.map(Limit::clip));
        let mode = match placed.is_automatic {
            true => Mode::data_parallel(mesh.world().clone(), DataParallel::Automatic),
            false => {
                let mut expand = Expand::new().input("**", "data", Placement::Shard(0));
                let cuts = placed.salt.map(|salt| self.plan.cuts(ranks, salt));
                for (path, axis, dim) in cuts.unwrap_or_default() {
                    expand = expand.parameter(&path, axis, Placement::Shard(dim));
                }
                Mode::expand(mesh.clone(), expand)
            }
        };
        mode.options(options)
    }

    fn compiled(
        &self,
        mode: Mode,
        mesh: &ProcessMesh,
        ranks: Ranks,
        steps: std::ops::Range<usize>,
        folder: &Path,
    ) -> Result<Vec<f32>, Error> {
        let world = mesh.world();
        let mut step = self.optimizer.compile(&self.plan, mode)?;
        if steps.start > 0 {
            restore_compiled(&mut step, &Checkpoints::new(folder).newest()?)?;
        }
        let mut losses = Vec::new();
        for number in steps.clone() {
            let part = ranks.part_of_batch(world.rank());
            let batch = |micro| self.batch(number, part, micro, &Device::flex());
            let batches: Vec<_> = (0..self.micro_batches).map(batch).collect();
            losses.push(match &batches[..] {
                [batch] => step.step(RATE, batch)? as f32,
                batches => step.step_accumulated(RATE, batches)? as f32,
            });
        }
        let axis = match ranks {
            Ranks::Grid(..) => "data",
            _ => "shard",
        };
        let mut taken = snapshot_compiled(&mut step, mesh.mesh(), axis)?;
        let training = TrainingState {
            step: steps.end as u64,
            optimizer: taken.optimizer,
            ..TrainingState::default()
        };
        save_step(
            &Checkpoints::new(folder),
            &SaveRequest::new(taken.plan, training),
            &mut taken.snapshot,
            &mut GroupRendezvous::new(world.clone()),
        )?;
        Ok(losses)
    }

    fn options(&self, compiled: &Compiled) -> Options {
        let units = match &compiled.units {
            None => Units::by_path(),
            Some(patterns) => Units::matching(patterns.iter().copied()),
        };
        let mut options = Options::default()
            .units(units)
            .kernels(compiled.kernels)
            .fuse(compiled.fuse)
            .reshard_after_forward(compiled.reshards)
            .prefetch(compiled.prefetches)
            .optimizer(compiled.place)
            .clip_grad_norm(self.clip.map(Limit::clip))
            .bucket(compiled.buckets.then(Bucket::default))
            .recompute(compiled.recomputes.then(Recompute::default));
        if compiled.recomputes_layers {
            options = options.recompute_units(["layers.*"]);
        }
        options
    }
}

impl Ranks {
    fn mesh(self, world: &ProcessGroup) -> Result<ProcessMesh, Error> {
        let mesh = match self {
            Self::Line(ranks) => Mesh::line("shard", ranks)?,
            Self::Copies(ranks) => Mesh::new([("replicate", 2), ("shard", ranks)])?,
            Self::Grid(data, model, 1) => Mesh::new([("data", data), ("model", model)])?,
            Self::Grid(data, model, depth) => {
                Mesh::new([("data", data), ("model", model), ("depth", depth)])?
            }
        };
        Ok(ProcessMesh::new(world, mesh)?)
    }
}

impl Case {
    /// Says where `got` differs from `want` by more than rounding.
    pub(crate) fn difference(&self, got: &Outcome, want: &Outcome) -> Option<String> {
        self.beyond(got, want, &[]).and_then(|_| {
            // What rounding makes of a number depends on the model: some amplify it a thousandfold, and gradients that
            // are zero but for rounding are seen in some of these alone.
            let nudged: Vec<_> = (1..=6).map(|nudge| self.plainly_nudged(nudge)).collect();
            self.beyond(got, want, &nudged)
        })
    }

    /// As [`difference`](Self::difference), where outcomes of parameters that differ by rounding are known.
    fn beyond(&self, got: &Outcome, want: &Outcome, nudged: &[Outcome]) -> Option<String> {
        let paths = |outcome: &Outcome| outcome.params.keys().cloned().collect::<Vec<_>>();
        if paths(got) != paths(want) {
            return Some(format!("saved {:?}, not {:?}", paths(got), paths(want)));
        }
        // Attention does not depend on a bias of its keys, whose gradient is therefore of rounding alone, and these
        // optimizers make steps of one size of whatever they get.
        let is_noise =
            |path: &str| self.optimizer.needs_whole_tensors() && path.ends_with("key.bias");
        let params = want.params.iter().filter(|(path, _)| !is_noise(path));
        let params = params.map(|(path, want)| {
            let nudged = nudged.iter().map(|nudged| &nudged.params[path]).collect();
            (path.as_str(), &got.params[path], want, nudged)
        });
        let of_losses: Vec<_> = nudged.iter().map(|nudged| &nudged.losses).collect();
        let losses = ("losses", &got.losses, &want.losses, of_losses);
        let mut all = [losses].into_iter().chain(params);
        all.find_map(|(name, got, want, nudged)| {
            let same_len = got.len() == want.len();
            let scales = nudged.iter().map(|nudged| largest_difference(nudged, want));
            let scale = scales.fold(0.0, f32::max);
            let is_near = |(got, want): (&f32, &f32)| {
                let tolerance = 2e-5 * (1.0 + want.abs()) + 30.0 * scale;
                // Also where one of them is no number.
                (got - want).abs() <= tolerance || (got.is_nan() && want.is_nan())
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

/// Returns the rows of several batches as one.
fn joined(batches: impl Iterator<Item = Batch>) -> Batch {
    let (tokens, targets) = batches.unzip::<_, _, Vec<_>, Vec<_>>();
    (Tensor::cat(tokens, 0), Tensor::cat(targets, 0))
}

fn largest_difference(one: &[f32], other: &[f32]) -> f32 {
    let differences = one
        .iter()
        .zip(other)
        .map(|(one, other)| (one - other).abs());
    differences.fold(0.0, f32::max)
}

fn saved_params(folder: &Path) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let step = Checkpoints::new(folder).newest()?;
    let tensors = step.index().tensors.iter();
    tensors
        .filter(|tensor| tensor.kind.is_model())
        .map(|tensor| {
            let all = Region::Flat(0..tensor.shape.iter().product());
            let bytes = step.read(&tensor.name, &all)?;
            let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
            let values = bytes.chunks_exact(4).map(number).collect();
            Ok((tensor.name.clone(), values))
        })
        .collect()
}

/// Values by path.
#[derive(Default)]
struct Params {
    path: Vec<String>,
    params: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Params {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data().try_to_vec().expect("32-bit floats");
        self.params.insert(self.path.join("."), values);
    }
}

/// Multiplies each gradient by what the function says of its values.
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

/// Scales all gradients by the norm of all of them.
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
