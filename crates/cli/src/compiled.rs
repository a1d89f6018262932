//! Training by a compiled step.

use std::sync::Mutex;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::spmd::passes::schedule::Options;
use burn_fsdp::spmd::plan::{MemoryPlan, Size};
use burn_fsdp::spmd::{CompiledStep, DataParallel, Mode, compile};
use burn_fsdp::steps::Step;
use burn_fsdp::{
    At, ProcessGroup, ProcessMesh, Strategy, TrainingSnapshot, load_compiled, restore_compiled,
    snapshot_compiled,
};
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{Batches, Gpt};
use serde_json::Value;

use crate::config::{Sharding, TrainConfig};
use crate::eager;
use crate::engine::Engine;
use crate::error::RankError;
use crate::trace::shifted;
use crate::train::initial_model;
use crate::{evaluation, fused, sample};

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// A compiled step, with its parameters and optimizer states.
pub(crate) struct Compiled<'a> {
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    mesh: &'a ProcessMesh,
    batches: Batches,
    step: CompiledStep<Tokens>,
    /// A sharded model to evaluate with, made when it is first asked for.
    model: Option<Gpt>,
}

/// The mode and the passes that divide a step as the configuration says.
pub(crate) fn mode(sharding: &Sharding, world: &ProcessGroup) -> Mode {
    let style = match sharding.strategy {
        Strategy::NoShard => DataParallel::Replicate,
        Strategy::FullShard | Strategy::ShardGradOp => DataParallel::FullyShard,
    };
    let mut options = Options::default();
    options.reshard_after_forward = sharding.strategy == Strategy::FullShard;
    // A default of the eager engine. Ranks that are threads move the bytes when they wait, so that
    // nothing is gained by starting early.
    options.prefetch = sharding.prefetch > 1;
    Mode::data_parallel(world.clone(), style).with_options(options)
}

impl<'a> Compiled<'a> {
    /// Divides the initial weights among the ranks. Collective.
    pub(crate) fn new(
        config: &'a TrainConfig,
        world: &'a ProcessGroup,
        mesh: &'a ProcessMesh,
    ) -> Result<Self, RankError> {
        let values = Device::flex();
        // Only rank 0's values count.
        let loaded = match world.rank() == 0 && config.init.is_some() {
            true => Some(initial_model(config, &values, 0)?),
            false => None,
        };
        let loaded = Mutex::new(loaded);
        let lazy = initial_model_of(config)?;
        let init = move |device: &Device| {
            // On other devices the model is only looked at.
            let wanted = *device == values;
            let loaded = loaded.lock().ok().filter(|_| wanted);
            let loaded = loaded.and_then(|mut loaded| loaded.take());
            loaded.unwrap_or_else(|| lazy(device))
        };
        let loss =
            |model: &Gpt, (inputs, targets): Tokens| recorded(|| model.loss(inputs, targets));
        let mode = mode(&config.sharding, world);
        let step = compile(init, loss, config.optimizer.build(), mode)?;
        Ok(Self {
            config,
            world,
            mesh,
            batches: config.data.training(&config.model, config.batch),
            step: step.with_operations(fused::operations()),
            model: None,
        })
    }

    fn begin(&self, step: usize) -> Result<Tokens, RankError> {
        self.world.begin_step(step as u64);
        self.world.fault_point(At::Forward)?;
        let rows = self.config.rows_of(self.world.rank());
        Ok(self.batches.rows(step, rows).to_tensors(&Device::flex()))
    }

    /// What the graph says of the bytes of a step.
    fn plan(&self) -> Result<Option<MemoryPlan>, RankError> {
        let graph = self.step.graph();
        let plan = graph.map(|graph| MemoryPlan::new(graph, self.world.rank()));
        Ok(plan.transpose()?)
    }

    /// A sharded model with the weights of now.
    fn sharded(&mut self) -> Result<&Gpt, RankError> {
        let model = match self.model.take() {
            Some(model) => model,
            None => {
                let model = self.config.model.init(&eager::device(), self.config.seed)?;
                eager::shard(self.config, self.mesh, model)?
            }
        };
        let model = load_compiled(model, &mut self.step)?;
        Ok(self.model.insert(model))
    }
}

/// Makes the model of the configuration, whose weights are drawn when they are used.
fn initial_model_of(
    config: &TrainConfig,
) -> Result<impl Fn(&Device) -> Gpt + Send + 'static, RankError> {
    let (model, seed) = (config.model, config.seed);
    model.validate()?;
    Ok(move |device: &Device| model.init(device, seed).expect("the sizes were validated"))
}

impl Engine for Compiled<'_> {
    fn step(&mut self, step: usize) -> Result<f32, RankError> {
        let batch = self.begin(step)?;
        let rate = self.config.schedule.at(step);
        let is_told = self.step.num_traces() == 0 && self.world.rank() == 0 && !self.config.json;
        let loss = self.step.step(rate, &batch)?;
        if let (true, Some(plan), Some(graph)) = (is_told, self.plan()?, self.step.graph()) {
            let (nodes, peak) = (graph.nodes().len(), Size(plan.peak_bytes()).trimmed());
            eprintln!("compiled: {nodes} operations, at most {peak} of tensors on a rank");
        }
        Ok(loss as f32)
    }

    fn traced_step(
        &mut self,
        step: usize,
        origin: Instant,
    ) -> Result<(f32, Vec<Value>), RankError> {
        let batch = self.begin(step)?;
        let rate = self.config.schedule.at(step);
        let (loss, timeline) = self.step.step_with_timeline(rate, &batch)?;
        let events = timeline.chrome_events(self.world.rank());
        let offset = timeline.began().saturating_duration_since(origin);
        Ok((loss as f32, shifted(events, offset)))
    }

    fn unsharded_peak(&self) -> Result<usize, RankError> {
        let plan = self.plan()?;
        let moments = plan.iter().flat_map(|plan| &plan.moments);
        let unsharded = moments.map(|m| m.during.full_parameters + m.during.gradients);
        Ok(unsharded.max().unwrap_or(0) as usize)
    }

    fn evaluate(&mut self) -> Result<Option<f64>, RankError> {
        let (config, world) = (self.config, self.world);
        if config.data.held_out(&config.model, config.batch).is_none() {
            return Ok(None);
        }
        evaluation::evaluate(self.sharded()?, config, world)
    }

    fn snapshot(&mut self) -> Result<TrainingSnapshot, RankError> {
        let layout = self.mesh.layout();
        Ok(snapshot_compiled(&mut self.step, layout, "shard")?)
    }

    fn resume(&mut self, saved: &Step) -> Result<(), RankError> {
        Ok(restore_compiled(&mut self.step, saved)?)
    }

    fn state_bytes(&self) -> Result<usize, RankError> {
        // Between steps there is nothing else.
        Ok(self.step.memory().live_bytes())
    }

    fn warnings(&self) -> Result<Vec<String>, RankError> {
        Ok(Vec::new())
    }

    fn sample(&mut self) -> Result<Option<Vec<u8>>, RankError> {
        let (config, world) = (self.config, self.world);
        if !sample::is_wanted(config) {
            return Ok(None);
        }
        sample::generate(self.sharded()?, config, world)
    }
}
