//! Compiled steps, by strategies and by placements.

use burn::tensor::{Device, Tensor};
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::compile::{
    CompiledStep, Evaluation, Expand, Mode, Options, restore_compiled, snapshot_compiled,
};
use burn_fsdp::internals::checkpoint::{LossScale, TrainingSnapshot};
use burn_fsdp::internals::compile::graph::Phase;
use burn_fsdp::internals::compile::passes::{
    Bucket, IterationGraph, IterationMove, PassId, Recompute, Units,
};
use burn_fsdp::internals::compile::{DataParallel, Error as StepError, OptionError};
use burn_fsdp::{Error, Placement, ProcessMesh};

use super::case::{Case, Limit};
use super::legs::{Compiled, Engine, Leg, Placed, Ranks};
use super::model::{Batch, Net};
use super::run::{Run, Strike};

pub(crate) struct CompiledRun {
    case: Case,
    leg: Leg,
    proves: bool,
    mesh: ProcessMesh,
    /// The folder and the step from which it continued.
    from: (Checkpoints, usize),
    step: CompiledStep<Batch>,
    evaluation: Evaluation<Batch, Tensor<1>>,
}

impl CompiledRun {
    /// Continues from step `start`, if there is a step before it. The plan is proved before it runs, if
    /// requested.
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
        let mode = if proves { mode.certified() } else { mode };
        let has_regions = match &leg.engine {
            Engine::Compiled(compiled) => compiled.recomputes_regions,
            _ => false,
        };
        let mut step = case
            .optimizer
            .compile(&case.plan, mode, (has_regions, case.states))?;
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
            proves,
            mesh: mesh.clone(),
            from: (checkpoints.clone(), start),
            step,
            evaluation,
        })
    }

    /// Begins again with a loss in one part.
    fn leave_loss_whole(&mut self) -> Result<(), Error> {
        let mut leg = self.leg.clone();
        if let Engine::Compiled(compiled) = &mut leg.engine {
            compiled.loss_chunks = 1;
        }
        let from = (&self.from.0, self.from.1);
        *self = Self::new(&self.case, (&leg, self.proves), &self.mesh, from)?;
        Ok(())
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
        let rates = self.case.rates.of(number);
        let run = |step: &mut CompiledStep<Batch>| match &batches[..] {
            [batch] => step.step(rates.clone(), batch),
            batches => step.step_accumulated(rates.clone(), batches),
        };
        let mut loss = run(&mut self.step);
        if let Err(StepError::Option(OptionError::LossChunks { .. })) = loss {
            // The rows of this loss cannot be divided. No rank has computed anything.
            self.leave_loss_whole()?;
            loss = run(&mut self.step);
        }
        Ok(loss? as f32)
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
        let mode = if compiled.has_owners {
            mode.one_owner(["**"])
        } else {
            mode
        };
        Ok(moving(mode.options(self.options(compiled)), compiled.moves))
    }

    fn mode_of_placements(&self, placed: &Placed, mesh: &ProcessMesh, ranks: Ranks) -> Mode {
        let options = Options::default()
            .fuse(placed.fuse)
            .optimizer(placed.place)
            .precision(placed.halves.precision(&self.plan))
            .scale_loss(placed.halves.are_scaled().then(|| self.scaling()))
            .clip_grad_norm(self.clip.map(Limit::clip));
        let mode = if placed.is_automatic {
            Mode::data_parallel(mesh.world().clone(), DataParallel::Automatic)
        } else {
            let mut expand = Expand::new().input("**", "data", Placement::Shard(0));
            let cuts = placed.salt.map(|salt| self.plan.cuts(ranks, salt));
            for (path, axis, dim) in cuts.unwrap_or_default() {
                expand = expand.parameter(&path, axis, Placement::Shard(dim));
            }
            Mode::expand(mesh.clone(), expand)
        };
        moving(mode.options(options), placed.moves)
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
            .loss_chunks(compiled.loss_chunks)
            .clip_grad_norm(self.clip.map(Limit::clip))
            .bucket(compiled.buckets.then(Bucket::default))
            .recompute(compiled.recomputes.then(Recompute::default));
        if compiled.recomputes_layers && self.plan.has_units("layers.*") {
            options = options.recompute_units(["layers.*"]);
        }
        options
    }
}

fn moving(mode: Mode, moves: Option<u64>) -> Mode {
    match moves {
        Some(salt) => mode.move_to_next_iteration(Moves(salt)),
        None => mode,
    }
}

/// Moves the optimizer's work for some parameters, and the reductions of other gradients, to the next step.
#[derive(Debug)]
struct Moves(u64);

impl IterationMove for Moves {
    fn id(&self) -> PassId {
        PassId::User("some moves")
    }

    fn moves(&self, step: &mut IterationGraph) -> Result<(), burn_fsdp::internals::compile::Error> {
        let trained = step.graph().parameters().iter();
        let trained = trained.filter(|of| of.gradient.is_some());
        let paths: Vec<_> = trained.map(|of| of.path.clone()).collect();
        let mut has_moved = false;
        for (number, path) in paths.iter().enumerate() {
            let nodes = step.graph().nodes().iter().enumerate();
            let stays = nodes.filter(|(at, _)| !step.is_moved(*at));
            let part = |at: &(usize, &burn_fsdp::internals::compile::graph::Node)| {
                at.1.phase == Phase::Optimizer && at.1.path.as_ref() == Some(path)
            };
            let mut part: Vec<usize> = stays.filter(part).map(|(at, _)| at).collect();
            if part.is_empty() {
                continue;
            }
            let choice = (self.0 >> (number % 8)) % 3;
            let gradient = step.graph().parameters().iter().find(|of| of.path == *path);
            let gradient = gradient.and_then(|of| of.gradient);
            let mut nodes = step.graph().nodes().iter();
            let writes = nodes.position(|node| node.outputs().any(|out| Some(out) == gradient));
            match (choice, writes) {
                (1, _) => {}
                (2, Some(writer)) => {
                    let with = step.with_readers([writer]);
                    part.extend(with.into_iter().filter(|at| !step.is_moved(*at)));
                }
                _ => continue,
            }
            let before = step.first_read(&part);
            // A norm that leaves the step, or a wait without its start: nothing has moved in that case.
            has_moved |= step.move_to_next_iteration(part, before).is_ok();
        }
        if has_moved {
            Ok(())
        } else {
            let nodes = step.graph().nodes().iter().enumerate();
            let all =
                nodes.filter(|(_, node)| node.phase == Phase::Optimizer && node.path.is_some());
            let all: Vec<usize> = all.map(|(at, _)| at).collect();
            let before = step.first_read(&all);
            step.move_to_next_iteration(all, before)
        }
    }
}
