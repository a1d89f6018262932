//! The steps of the eager engine.

use std::cell::Cell;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::inspect::units;
use burn_fsdp::internals::checkpoint::{LossScale, TrainingSnapshot, loss_scale, restore_scaler};
use burn_fsdp::internals::optim::backward_and_step;
use burn_fsdp::internals::sharding::{
    Audit, BaseBits, FullGradient, ParameterShard, offload_activations,
};
use burn_fsdp::optim::check_elementwise;
use burn_fsdp::sharding::Cut;
use burn_fsdp::state::{BufferSync, into_record, sync_buffers};
use burn_fsdp::{
    Error, LossScaler, ProcessMesh, ShardPolicy, backward, catch, clip_grad_norm, fully_shard,
    no_sync,
};

use super::case::Case;
use super::legs::{Accumulation, Eager, Leg, Ranks};
use super::model::{Net, Plan};
use super::run::{KILLED, Run, Strike};

pub(crate) struct EagerRun {
    case: Case,
    leg: Leg,
    eager: Eager,
    mesh: ProcessMesh,
    /// Taken out while it is stepped.
    net: Option<Net>,
    optimizer: ModuleOptimizer,
    scaler: Option<LossScaler>,
}

/// Returns the device of sharded models. Another backend would round in another way, and optimizers that divide by the
/// size of a gradient amplify that beyond any tolerance.
fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

impl EagerRun {
    /// Continues from step `start`, if there is a step before it.
    pub(crate) fn new(
        case: &Case,
        (leg, eager): (&Leg, &Eager),
        mesh: &ProcessMesh,
        (checkpoints, start): (&Checkpoints, usize),
    ) -> Result<Self, Error> {
        let mut net = case.sharded(eager, mesh, leg.ranks)?;
        let mut optimizer = case.module_optimizer(&case.plan);
        let mut scaler = if eager.halves.are_scaled() {
            Some(LossScaler::new(case.scaling())?)
        } else {
            None
        };
        if start > 0 {
            let saved = checkpoints.open(start as u64)?;
            (net, optimizer) = restore(net, optimizer, &saved)?;
            scaler = scaler.map(|scaler| restore_scaler(scaler, &saved));
        }
        let run = Self {
            case: case.clone(),
            leg: leg.clone(),
            eager: eager.clone(),
            mesh: mesh.clone(),
            net: Some(net),
            optimizer,
            scaler,
        };
        run.check_optimizer()?;
        Ok(run)
    }

    /// Tries the optimizer where its first step has gradients that cannot be used to try it, as the book
    /// explains.
    fn check_optimizer(&self) -> Result<(), Error> {
        match self.eager.accumulation {
            Accumulation::Burn => Ok(check_elementwise(self.net(), &self.optimizer)?),
            _ => Ok(()),
        }
    }

    fn net(&self) -> &Net {
        self.net.as_ref().expect("not in the middle of a step")
    }

    fn plan(&self) -> &Plan {
        &self.case.plan
    }

    /// Returns the mean loss of a micro-batch, as a part of the step's.
    fn loss(&self, step: usize, micro: usize, strike: &Strike) -> Result<Tensor<1>, Error> {
        let part = self.leg.ranks.part_of_batch(self.mesh.world().rank());
        let place = Case::place(&self.leg, step, part, micro);
        let batch = self.plan().batch(place, &device());
        let (left, net) = (Cell::new(strike.layers_left), self.net());
        let each = || match left.get() {
            Some(0) => panic!("{KILLED}"),
            layers => left.set(layers.map(|layers| layers - 1)),
        };
        let loss = catch(|| {
            if !self.eager.recomputes {
                return Ok(self.plan().loss(net, batch, each));
            }
            let recomputed = || self.plan().loss_recomputed(net, batch, each);
            if self.eager.offloads {
                offload_activations(Device::flex(), recomputed)
            } else {
                Ok(recomputed())
            }
        })??;
        Ok(loss / self.case.micro_batches as f64)
    }

    /// Returns the loss of a step and its gradients.
    fn gradients(&self, step: usize, strike: &Strike) -> Result<(f32, GradientsParams), Error> {
        let net = self.net();
        let mut total = 0.0;
        let last = self.case.micro_batches - 1;
        let mut backward_of = |loss: Tensor<1>| {
            total += loss.clone().into_scalar::<f32>();
            let loss = match &self.scaler {
                Some(scaler) => scaler.scale(loss),
                None => loss,
            };
            strike.backward(self.mesh.world());
            Ok::<_, Error>(backward(loss, net)?)
        };
        let gradients = match self.eager.accumulation {
            Accumulation::Joined => {
                let mut sum = self.loss(step, 0, strike)?;
                for micro in 1..=last {
                    sum = sum + self.loss(step, micro, strike)?;
                }
                backward_of(sum)?
            }
            Accumulation::NoSync => {
                for micro in 0..last {
                    no_sync(net, || backward_of(self.loss(step, micro, strike)?))??;
                }
                backward_of(self.loss(step, last, strike)?)?
            }
            Accumulation::Burn => {
                let mut accumulator = GradientsAccumulator::new();
                for micro in 0..=last {
                    accumulator.accumulate(net, backward_of(self.loss(step, micro, strike)?)?);
                }
                accumulator.grads()
            }
        };
        Ok((total, gradients))
    }

    /// Moves model and optimizer to a new module, by Burn's records.
    fn renewed(&mut self) -> Result<(), Error> {
        let record = into_record(self.net().clone())?;
        let of_optimizer = self.optimizer.to_record();
        let net = self.case.sharded(&self.eager, &self.mesh, self.leg.ranks)?;
        let net = catch(|| net.load_record(record))?;
        burn_fsdp::internals::state::settle_ids(&net);
        self.net = Some(net);
        let optimizer = self.case.module_optimizer(self.plan());
        self.optimizer = optimizer.load_record(of_optimizer);
        self.check_optimizer()
    }
}

impl EagerRun {
    fn steps_in_backward(&self) -> bool {
        let is_engines = self.eager.accumulation != Accumulation::Burn;
        let is_free = self.scaler.is_none() && self.case.clip.is_none();
        self.eager.steps_in_backward && is_engines && is_free
    }

    /// Makes a step whose last backward runs the optimizer.
    fn step_in_backward(&mut self, step: usize, strike: &Strike) -> Result<f32, Error> {
        let last = self.case.micro_batches - 1;
        let mut total = 0.0;
        let loss = if self.eager.accumulation == Accumulation::NoSync {
            for micro in 0..last {
                no_sync(self.net(), || {
                    let loss = self.loss(step, micro, strike)?;
                    total += loss.clone().into_scalar::<f32>();
                    strike.backward(self.mesh.world());
                    Ok::<_, Error>(backward(loss, self.net())?)
                })??;
            }
            self.loss(step, last, strike)?
        } else {
            let mut sum = self.loss(step, 0, strike)?;
            for micro in 1..=last {
                sum = sum + self.loss(step, micro, strike)?;
            }
            sum
        };
        total += loss.clone().into_scalar::<f32>();
        strike.backward(self.mesh.world());
        let net = self.net.take().expect("not in the middle of a step");
        let rates = self.case.rates.of(step);
        let net = backward_and_step(loss, net, &mut self.optimizer, rates)?;
        self.net = Some(net);
        if self.eager.moves {
            self.renewed()?;
        }
        Ok(total)
    }
}

impl Run for EagerRun {
    fn step(&mut self, step: usize, strike: &Strike) -> Result<f32, Error> {
        if self.steps_in_backward() {
            return self.step_in_backward(step, strike);
        }
        let (loss, mut gradients) = self.gradients(step, strike)?;
        let net = self.net.take().expect("not in the middle of a step");
        if let Some(scaler) = &mut self.scaler {
            match scaler.unscale(&net, gradients)? {
                Some(unscaled) => gradients = unscaled,
                None => {
                    self.net = Some(net);
                    return Ok(loss);
                }
            }
        }
        if let Some(limit) = self.case.clip {
            gradients = clip_grad_norm(&net, gradients, limit.clip())?.gradients;
        }
        let (optimizer, rates) = (&mut self.optimizer, self.case.rates.of(step));
        self.net = Some(catch(|| optimizer.step(rates, net, gradients))?);
        if self.eager.moves {
            self.renewed()?;
        }
        Ok(loss)
    }

    fn evaluate(&mut self, end: usize) -> Result<f32, Error> {
        let net = self.net.take().expect("not in the middle of a step");
        let net = sync_buffers(net, BufferSync::Broadcast)?;
        let batch = self
            .plan()
            .batch(Case::place_of_evaluation(end), &Device::flex());
        let valid = net.valid().dropping();
        let loss = || {
            let loss = catch(|| self.plan().loss(&valid, batch.clone(), || {}))?;
            Ok::<_, Error>(loss.into_scalar::<f32>())
        };
        // The second forward gathers ahead along the first.
        let [loss, again] = [loss()?, loss()?];
        assert_eq!(
            loss.to_bits(),
            again.to_bits(),
            "two forwards without autodiff"
        );
        self.net = Some(net);
        Ok(loss)
    }

    fn snapshot(&mut self) -> Result<TrainingSnapshot, Error> {
        let mesh = self.mesh.mesh();
        Ok(snapshot(self.net(), &self.optimizer, mesh, "shard")?)
    }

    fn loss_scale(&self) -> Option<LossScale> {
        self.scaler.as_ref().map(loss_scale)
    }
}

impl Case {
    /// Returns the initial model, sharded.
    fn sharded(&self, eager: &Eager, mesh: &ProcessMesh, ranks: Ranks) -> Result<Net, Error> {
        let net = self.plan.init_without_adapters(&device(), 0, 0.0);
        let net = fully_shard(net, mesh, self.policy(eager, ranks))?;
        if let Some(seed) = eager.lists {
            list_at_random(&net, seed)?;
        }
        if self.plan.adapters.is_none() {
            return Ok(net);
        }
        // The factors that it was given are random.
        let record = self.plan.init(&device()).into_record();
        Ok(catch(|| net.load_record(record))?)
    }

    fn policy(&self, eager: &Eager, ranks: Ranks) -> ShardPolicy {
        // A pattern that matches nothing is rejected.
        let units = eager.units.iter().copied();
        let units = units.filter(|pattern| self.plan.has_units(pattern));
        let mut policy = ShardPolicy::new()
            .units(units)
            .strategy(eager.strategy)
            .cut(eager.cut)
            .whole_below(eager.whole_below)
            .shard_vectors(eager.shards_vectors)
            .gather_in_8_bits(eager.gathers_in_8_bits)
            .prefetch(eager.prefetch)
            .reshard_root(eager.reshards_root)
            .audit(Audit::EveryStep)
            .precision(eager.halves.precision(&self.plan));
        if eager.has_owners {
            policy = policy.one_owner(["**"]);
        }
        if eager.has_hook {
            policy = policy.reduction_hook(|unit| {
                let gradients = unit.gradients().iter();
                unit.reduce_scatter(gradients.map(FullGradient::tensor).collect())
            });
            policy = policy.all_reduce_hook(|unit| {
                let gradients = unit.gradients().iter();
                unit.average(gradients.map(FullGradient::tensor).collect())
            });
            // The engine's 8 bits exclude a hook.
            if !eager.gathers_in_8_bits {
                policy = policy.gather_hook(|unit| {
                    let shards = unit.shards().iter();
                    unit.all_gather(shards.map(ParameterShard::tensor).collect())
                });
            }
        }
        if eager.in_files {
            policy = policy.in_files(std::env::temp_dir(), ["**"]);
        }
        if eager.selects_regions && self.plan.has_units("layers.0") {
            policy = policy.recompute_in(["layers.0"]);
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
        let Some(lora) = self.plan.lora() else {
            return policy;
        };
        match self.plan.base_bits() {
            // Shards begin with a block.
            Some(bits) => policy.lora(lora).base_in(bits).cut(match eager.cut {
                Cut::Multiples(number) if number % BaseBits::BLOCK == 0 => eager.cut,
                _ => Cut::Elements,
            }),
            None => policy.lora(lora),
        }
    }
}

/// Lists some units for each unit to gather ahead, whether or not they are used then.
fn list_at_random(net: &Net, seed: u64) -> Result<(), Error> {
    let mut state = seed;
    let handles = units(net)?;
    for handle in &handles {
        let mut some = || {
            let one = |_| {
                // A step of a linear congruential generator; the high bits are random enough.
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                handles[(state >> 33) as usize % handles.len()].clone()
            };
            (0..2).map(one).collect::<Vec<_>>()
        };
        handle.set_forward_prefetch(&some()[..])?;
        handle.set_backward_prefetch(&some()[..])?;
    }
    Ok(())
}
