//! Compiled steps, by strategies and by placements.

use burn::tensor::{Device, Tensor};
use burn_fsdp::Error;
use burn_fsdp::Placement;
use burn_fsdp::ProcessMesh;
use burn_fsdp::checkpoint::{Checkpoints, LossScale, TrainingSnapshot};
use burn_fsdp::compile::passes::schedule::Options;
use burn_fsdp::compile::passes::{Bucket, Recompute, Units};
use burn_fsdp::compile::{
    CompiledStep, DataParallel, Evaluation, Expand, Mode, restore_compiled, snapshot_compiled,
};

use super::case::{Case, Limit};
use super::legs::{Compiled, Engine, Leg, Placed, Ranks};
use super::model::{Batch, Net};
use super::plain::RATE;
use super::run::{Run, Strike};

pub(crate) struct CompiledRun {
    case: Case,
    leg: Leg,
    mesh: ProcessMesh,
    step: CompiledStep<Batch>,
    evaluation: Evaluation<Batch, Tensor<1>>,
}

impl CompiledRun {
    /// Goes on from step `start`, if there is one before it. The plan is proved before it runs, if asked for.
    pub(crate) fn new(
        case: &Case,
        (leg, proves): (&Leg, bool),
        mesh: &ProcessMesh,
        (checkpoints, start): (&Checkpoints, usize),
    ) -> Result<Self, Error> {
        let mode = match &leg.engine {
            Engine::Placed(placed) => case.mode_of_placements(placed, mesh, leg.ranks),
            Engine::Compiled(compiled) => case.mode(compiled, mesh, leg.ranks)?,
            Engine::Eager(_) => unreachable!("a compiled engine"),
        };
        let mode = match proves {
            true => mode.certified(),
            false => mode,
        };
        let has_regions = match &leg.engine {
            Engine::Compiled(compiled) => compiled.recomputes_regions,
            _ => false,
        };
        let mut step = case.optimizer.compile(&case.plan, mode, has_regions)?;
        if start > 0 {
            restore_compiled(&mut step, &checkpoints.open(start as u64)?)?;
        }
        let (built, run) = (case.plan.clone(), case.plan.clone());
        let evaluation = Evaluation::new(
            move |device: &Device| built.init(device).dropping(),
            move |net: &Net, batch: Batch| run.loss(net, batch, || {}),
        );
        Ok(Self {
            case: case.clone(),
            leg: leg.clone(),
            mesh: mesh.clone(),
            step,
            evaluation,
        })
    }
}

impl Run for CompiledRun {
    fn step(&mut self, number: usize, _: &Strike) -> Result<f32, Error> {
        let part = self.leg.ranks.part_of_batch(self.mesh.world().rank());
        let batch = |micro| {
            let place = Case::place(&self.leg, number, part, micro);
            self.case.plan.batch(place, &Device::flex())
        };
        let batches: Vec<_> = (0..self.case.micro_batches).map(batch).collect();
        let loss = match &batches[..] {
            [batch] => self.step.step(RATE, batch)?,
            batches => self.step.step_accumulated(RATE, batches)?,
        };
        Ok(loss as f32)
    }

    fn evaluate(&mut self, end: usize) -> Result<f32, Error> {
        let place = Case::place_of_evaluation(end);
        let batch = self.case.plan.batch(place, &Device::flex());
        let loss: Tensor<1> = self.step.evaluate(&mut self.evaluation, &batch)?;
        Ok(loss.into_scalar::<f32>())
    }

    fn snapshot(&mut self) -> Result<TrainingSnapshot, Error> {
        let axis = match self.leg.ranks {
            Ranks::Grid(..) => "data",
            _ => "shard",
        };
        Ok(snapshot_compiled(&mut self.step, self.mesh.mesh(), axis)?)
    }

    fn loss_scale(&self) -> Option<LossScale> {
        let state = self.step.loss_scale()?;
        Some(LossScale {
            scale: state.scale,
            good_steps: state.growth_tracker.into(),
        })
    }
}

impl Case {
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

    fn options(&self, compiled: &Compiled) -> Options {
        let units = match &compiled.units {
            None => Units::by_path(),
            Some(patterns) => {
                let patterns = patterns.iter().copied();
                Units::matching(patterns.filter(|pattern| self.plan.has_units(pattern)))
            }
        };
        let mut options = Options::default()
            .units(units)
            .kernels(compiled.kernels)
            .precision(compiled.halves.precision(&self.plan))
            .scale_loss(compiled.halves.are_scaled().then(|| self.scaling()))
            .fuse(compiled.fuse)
            .reshard_after_forward(compiled.reshards)
            .prefetch(compiled.prefetches)
            .optimizer(compiled.place)
            .clip_grad_norm(self.clip.map(Limit::clip))
            .bucket(compiled.buckets.then(Bucket::default))
            .recompute(compiled.recomputes.then(Recompute::default));
        if compiled.recomputes_layers && self.plan.has_units("layers.*") {
            options = options.recompute_units(["layers.*"]);
        }
        options
    }
}
