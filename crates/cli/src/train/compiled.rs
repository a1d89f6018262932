//! The trainer that runs a compiled step.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::time::Instant;

use burn::backend::Flex;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp::compile::{CompiledStep, Evaluation, LossScaling, Mode, Options, load_compiled};
use burn_fsdp::inspect::auto_units;
use burn_fsdp::internals::checkpoint::{Step, TrainingSnapshot};
use burn_fsdp::internals::compile::graph::Graph;
use burn_fsdp::internals::compile::passes::Units;
use burn_fsdp::internals::compile::trace::{OptimizerStep, TraceConfig, trace};
use burn_fsdp::internals::compile::{
    BackendIr, Certificate, Error, HalfProducts, ShardSpec, certify_at, compile_on, kernels,
    restore_compiled_matching, snapshot_compiled_matching,
};
use burn_fsdp::internals::plan::{BudgetError, Size, fit};
use burn_fsdp::internals::testing::At;
use burn_fsdp::plan::MemoryPlan;
use burn_fsdp::{LossScaler, ProcessGroup, ProcessMesh};
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{Architecture, LanguageModel, WeightsFile};
use serde_json::Value;

use crate::adapters::{AdapterSizes, Adapters, is_saved};
use crate::console;
use crate::error::{InputError, RankError};
use crate::train::config::TrainConfig;
use crate::train::feed::{Feed, Tokens, tokens_of, tokens_of_shape};
use crate::train::trace::shifted;
use crate::train::trainer::Trainer;
use crate::train::{evaluation, model, sample};
use crate::weights;

/// A compiled step on a backend, with its parameters and optimizer state.
struct Compiled<'a, A: Architecture, Be: BackendIr> {
    sizes: A,
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    mesh: &'a ProcessMesh,
    batches: Feed<'a>,
    step: CompiledStep<Tokens, Be>,
    /// Number of traces so far, and peak bytes of full parameters and gradients in the latest traced graph.
    unsharded: Option<(usize, usize)>,
    gradients: Gradients,
    /// The compiled loss for held-out text.
    loss: Evaluation<Tokens, Tensor<1>>,
    /// Units that are recomputed in backward to meet the memory budget.
    recomputed: Vec<String>,
    /// A sharded model for generation, created when it is first needed.
    model: Option<A::Model>,
    /// The adapters, if nothing else is trained.
    adapters: Option<Adapters>,
}

/// The gradient norm and loss scale of the last step.
struct Gradients {
    /// The gradient norm, if it was computed.
    norm: Option<f64>,
    /// The loss scale to be saved, if the loss is scaled.
    scaler: Option<LossScaler>,
}

/// Returns the compile mode for the configuration, and the units that must be recomputed to keep a step within its
/// memory budget.
fn mode<A: Architecture>(
    sizes: A,
    config: &TrainConfig,
    world: &ProcessGroup,
    mesh: &ProcessMesh,
) -> Result<(Mode, Vec<String>), RankError> {
    let sharding = &config.sharding;
    let prefetch = sharding.prefetch.map(|units| units > 0);
    let options = Options::default().prefetch(prefetch);
    let options = options.clip_grad_norm(config.step.clip);
    let options = options.loss_chunks(config.step.loss_chunks);
    let options = options.precision(sharding.precision.clone());
    let options = options.scale_loss(config.step.scales_loss.then(LossScaling::default));
    let options = match sharding.unit_size {
        Some(least) => {
            let model = sizes.blank(&Device::flex())?;
            options.units(Units::matching(auto_units(&model, least)))
        }
        None => options,
    };
    let options = if config.step.activation_checkpointing {
        options.recompute_units([A::BLOCKS])
    } else {
        options
    };
    let mode = match sharding.replicas {
        1 => Mode::data_parallel(world.clone(), sharding.strategy),
        _ => Mode::hybrid(mesh.clone(), "replicate", sharding.strategy)?,
    };
    // No effect for an optimizer that needs no whole parameters.
    let mode = mode.one_owner(config.optimizer.owned());
    let Some(budget) = config.step.memory_budget else {
        return Ok((mode.options(options), Vec::new()));
    };
    let rows = config.micro_rows_of(world.rank(), 0).len();
    let step = (OptimizerStep::Next, config.schedule.at(0));
    let graph = traced(sizes, config, [rows, config.seq], step)?;
    let fitted = fit(&graph, &mode, &options, budget).map_err(|error| match error {
        BudgetError::Step(error) => RankError::Compiled(Box::new(error)),
        error => RankError::Input(Box::new(InputError::Budget(Box::new(error)))),
    })?;
    let units = fitted.units.iter().map(ToString::to_string).collect();
    Ok((mode.options(fitted.options), units))
}

/// Traces a step of a model on a batch of this shape, before the step is sharded.
fn traced<A: Architecture>(
    sizes: A,
    config: &TrainConfig,
    shape: [usize; 2],
    (step, learning_rate): (OptimizerStep, f64),
) -> Result<Graph, RankError> {
    let (seed, adapters) = (config.seed, config.adapter_sizes().cloned());
    let batch = tokens_of_shape(shape, config.data.beside_tokens());
    sizes.validate()?;
    let init = move |device: &Device| lazy(sizes, adapters.as_ref(), device, seed);
    let optimizer = config.optimizer.groups();
    let config = TraceConfig {
        step,
        learning_rate,
        precision: config.sharding.precision.clone(),
        scales_loss: config.step.scales_loss,
    };
    let graph = trace(init, loss::<A::Model>, &optimizer, &batch, config)?;
    Ok(kernels().describe(graph)?)
}

/// Proves the plans of a run's steps, and prints the result. Up to four kinds of steps have separate plans, because the
/// optimizer has no state in the first step, and omits operations if the learning rate is zero. The plans are created
/// for the model, rows and tokens of a rank. The proof uses the first of several small shapes at which a narrower model
/// does the same operations.
fn prove<A: Architecture>(
    sizes: A,
    config: &TrainConfig,
    mode: &Mode,
    ranks: usize,
) -> Result<Vec<Certificate>, RankError> {
    /// Rows, tokens and minimum widths. Rows and tokens are at most the real ones.
    const SMALL: [[usize; 3]; 3] = [[2, 4, 6], [3, 5, 11], [5, 7, 23]];
    let rows = config.micro_rows_of(0, 0).len();
    let shape = [rows, config.seq];
    // The first step of each kind.
    let mut kinds: BTreeMap<(bool, bool), (usize, f64)> = BTreeMap::new();
    for number in 0..config.num_steps() {
        let rate = config.schedule.at(number);
        let kind = kinds.entry((number > 0, rate == 0.0));
        kind.or_insert((number, rate));
    }
    let mut certificates: Vec<Certificate> = Vec::new();
    for ((is_later, _), (number, rate)) in kinds {
        let step = if is_later {
            (OptimizerStep::Next, rate)
        } else {
            (OptimizerStep::First, rate)
        };
        let real = traced(sizes, config, shape, step)?;
        let mut refused = None;
        let proved = SMALL.iter().find_map(|&[rows, tokens, width]| {
            let [rows, tokens] = [rows.min(shape[0]), tokens.min(shape[1])];
            let narrow = sizes.narrowed(ranks, width.max(ranks));
            let small = traced(
                narrow.for_sequences_of(tokens),
                config,
                [rows, tokens],
                step,
            );
            let proved = small.and_then(|small| {
                let (real, batches) = (real.clone(), config.step.accumulate);
                Ok(certify_at(real, small, batches, mode)?)
            });
            match proved {
                // Dims of equal size by coincidence may be the cause; another shape may avoid this.
                Err(RankError::Compiled(error)) if matches!(*error, Error::Proof(_)) => {
                    refused.get_or_insert(RankError::Compiled(error));
                    None
                }
                proved => Some(proved),
            }
        });
        let certificate = match (proved, refused) {
            (Some(proved), _) => proved?,
            (None, Some(refused)) => return Err(refused),
            (None, None) => continue,
        };
        if !config.json {
            console::tell(format_args!(
                "proved: the plan of step {}, {certificate}",
                number + 1
            ));
        }
        certificates.push(certificate);
    }
    Ok(certificates)
}

/// Lazily creates the model to train, with its adapters. The sizes must be valid. Burn draws the adapters' factors.
fn lazy<A: Architecture>(
    sizes: A,
    adapters: Option<&AdapterSizes>,
    device: &Device,
    seed: u64,
) -> A::Model {
    let model = sizes.init(device, seed).expect("the sizes were validated");
    match adapters {
        Some(adapters) => adapters.attached_to(model, sizes),
        None => model,
    }
}

fn loss<M: LanguageModel>(model: &M, (inputs, targets): Tokens) -> Tensor<1> {
    recorded(|| model.mean_loss(inputs, targets))
}

/// Returns the loss to trace for a device: only the CPU has the models' kernels.
fn loss_on<M: LanguageModel>(device: &Device) -> fn(&M, Tokens) -> Tensor<1> {
    if *device == Device::flex() {
        loss::<M>
    } else {
        |model, (inputs, targets)| model.mean_loss(inputs, targets)
    }
}

/// Creates the trainer that runs a compiled step on the rank's device. Shards the initial weights over the ranks. If
/// they come from a file, each rank reads its shards. Collective.
pub(crate) fn trainer<'a, A: Architecture>(
    sizes: A,
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    mesh: &'a ProcessMesh,
) -> Result<Box<dyn Trainer + 'a>, RankError> {
    #[cfg(any(
        feature = "wgpu",
        feature = "vulkan",
        feature = "metal",
        feature = "webgpu",
        feature = "cuda",
        feature = "rocm"
    ))]
    if let burn::backend::DispatchDevice::Cube(on) = config.device(world).as_dispatch() {
        let on = on.clone();
        let step = Compiled::<A, burn::backend::Cube>::new(sizes, config, (world, mesh), on)?;
        return Ok(Box::new(step));
    }
    let step = Compiled::<A, Flex>::new(sizes, config, (world, mesh), Default::default())?;
    Ok(Box::new(step))
}

impl<'a, A: Architecture, Be: BackendIr> Compiled<'a, A, Be> {
    fn new(
        sizes: A,
        config: &'a TrainConfig,
        (world, mesh): (&'a ProcessGroup, &'a ProcessMesh),
        on: Be::Device,
    ) -> Result<Self, RankError> {
        let (seed, adapters) = (config.seed, config.adapter_sizes().cloned());
        sizes.validate()?;
        let device = config.device(world);
        let own = device.clone();
        let of_evaluation = adapters.clone();
        let init = move |device: &Device| {
            // On other devices, the model is only inspected.
            if adapters.is_some() && *device == own {
                device.seed(seed);
            }
            lazy(sizes, adapters.as_ref(), device, seed)
        };
        let loss = loss_on::<A::Model>(&device);
        let held_out = Evaluation::on(
            &device,
            move |device: &Device| lazy(sizes, of_evaluation.as_ref(), device, seed),
            loss,
        );
        let (mode, recomputed) = mode(sizes, config, world, mesh)?;
        let mode = if config.step.is_certified && world.rank() == 0 {
            let certificates = prove(sizes, config, &mode, world.size())?;
            mode.proved(&certificates)
        } else {
            mode
        };
        let mode = match &config.dump_graphs {
            Some(folder) => mode.dump(folder),
            None => mode,
        };
        let file = config.init.as_deref();
        let file = file
            .map(|path| WeightsFile::open(path, sizes))
            .transpose()?;
        let read =
            |shard: &ShardSpec<'_>| weights::read_part(file.as_ref(), config.factors(), shard);
        let optimizer = config.optimizer.groups();
        let values = (init, read);
        let mut step = compile_on::<Be, _, _, _, _, (), RankError>(
            values,
            loss,
            optimizer,
            mode,
            (),
            (&device, on),
        )?;
        let adapters = config.adapter_sizes();
        let adapters = adapters.map(|sizes| Adapters::of_compiled(sizes, &mut step, mesh));
        let adapters = adapters.transpose()?;
        Ok(Self {
            adapters,
            sizes,
            config,
            world,
            mesh,
            batches: config
                .data
                .training(config.model.vocab(), config.batch_shape(), config.seed),
            step,
            unsharded: None,
            gradients: Gradients {
                norm: None,
                scaler: config.step.scales_loss.then(LossScaler::default),
            },
            loss: held_out,
            recomputed,
            model: None,
        })
    }

    /// Returns the micro-batches of a step.
    fn begin(&self, step: usize) -> Result<Vec<Tokens>, RankError> {
        self.world.begin_step(step as u64);
        self.world.fault_point(At::Forward)?;
        let micro = (0..self.config.step.accumulate).map(|micro| -> Result<_, RankError> {
            let rows = self.config.micro_rows_of(self.world.rank(), micro);
            let rows = self.batches.rows(step, rows)?;
            Ok(tokens_of(&rows, &self.config.device(self.world)))
        });
        micro.collect()
    }

    /// Stores the current loss scale for the next save.
    fn look_at_scale(&mut self) {
        let scale = self.step.loss_scale();
        self.gradients.scaler = scale.map(|scale| LossScaler::default().restored(scale));
    }

    /// Collects the results of a step.
    fn end(&mut self) -> Result<(), RankError> {
        self.look_at_scale();
        self.gradients.norm = self.step.grad_norm();
        self.look_at_graph()
    }

    /// Plans the memory of a new graph, and prints the size of the first one.
    fn look_at_graph(&mut self) -> Result<(), RankError> {
        let traced = self.step.num_traces();
        let Some(graph) = self.step.graph() else {
            return Ok(());
        };
        if self.unsharded.is_some_and(|(of, _)| of == traced) {
            return Ok(());
        }
        let plan = MemoryPlan::new(graph, self.world.rank())?;
        if self.unsharded.is_none() && self.world.rank() == 0 && !self.config.json {
            let (nodes, peak) = (graph.nodes().len(), Size(plan.peak_bytes()).trimmed());
            if self.config.device(self.world) == Device::flex() {
                console::tell(format_args!(
                    "compiled: {nodes} operations, at most {peak} of tensors per rank"
                ))
            } else {
                // The plan is of the CPU's memory.
                console::tell(format_args!("compiled: {nodes} operations"))
            }
        }
        let moments = plan.moments.iter().map(|moment| moment.during);
        let unsharded = moments.map(|bytes| bytes.full_parameters + bytes.gradients);
        self.unsharded = Some((traced, unsharded.max().unwrap_or(0) as usize));
        Ok(())
    }

    /// Returns a sharded model with the current weights.
    fn sharded(&mut self) -> Result<&A::Model, RankError> {
        let model = match self.model.take() {
            Some(model) => model,
            None => {
                let device = model::device(self.config, self.world);
                let model = self.sizes.blank(&device)?;
                model::shard(self.sizes, self.config, self.mesh, model)?
            }
        };
        let model = load_compiled(model, &mut self.step)?;
        Ok(self.model.insert(model))
    }
}

impl<A: Architecture, Be: BackendIr> Trainer for Compiled<'_, A, Be> {
    fn step(&mut self, step: usize) -> Result<f32, RankError> {
        let batches = self.begin(step)?;
        let rate = self.config.schedule.at(step);
        let loss = self.step.step_accumulated(rate, &batches)? as f32;
        self.end().map(|()| loss)
    }

    fn traced_step(
        &mut self,
        step: usize,
        origin: Instant,
    ) -> Result<(f32, Vec<Value>), RankError> {
        let batches = self.begin(step)?;
        let rate = self.config.schedule.at(step);
        let (loss, timeline) = self.step.step_accumulated_with_timeline(rate, &batches)?;
        self.end()?;
        let events = timeline.chrome_events(self.world.rank());
        let offset = timeline.began().saturating_duration_since(origin);
        Ok((loss as f32, shifted(events, offset)))
    }

    fn unsharded_peak(&self) -> Result<usize, RankError> {
        Ok(self.unsharded.map_or(0, |(_, bytes)| bytes))
    }

    fn staged(&self) -> Result<[usize; 2], RankError> {
        let staged = self.step.staged();
        Ok([staged.to_host.bytes, staged.to_device.bytes])
    }

    fn evaluate(&mut self) -> Result<Option<f64>, RankError> {
        let (config, world) = (self.config, self.world);
        let device = config.device(world);
        evaluation::evaluate(config, world, |rows| {
            let loss = self
                .step
                .evaluate(&mut self.loss, &tokens_of(rows, &device))?;
            Ok(loss.into_scalar::<f32>())
        })
    }

    fn grad_norm(&self) -> Option<f64> {
        self.gradients.norm
    }

    fn snapshot(&mut self) -> Result<TrainingSnapshot, RankError> {
        let layout = self.mesh.mesh();
        let is_saved = is_saved(self.adapters.as_ref());
        let step = &mut self.step;
        Ok(snapshot_compiled_matching(step, layout, "shard", is_saved)?)
    }

    fn scaler(&self) -> Option<&LossScaler> {
        self.gradients.scaler.as_ref()
    }

    fn adapters(&self) -> Option<&Adapters> {
        self.adapters.as_ref()
    }

    fn resume(&mut self, saved: &Step) -> Result<(), RankError> {
        if let Some(adapters) = &self.adapters {
            adapters.check(&saved.index().training)?;
        }
        let is_saved = is_saved(self.adapters.as_ref());
        restore_compiled_matching(&mut self.step, saved, is_saved)?;
        self.look_at_scale();
        Ok(())
    }

    fn state_bytes(&self) -> Result<usize, RankError> {
        // Nothing else is live between steps.
        Ok(self.step.memory().live_bytes())
    }

    fn warnings(&self) -> Result<Vec<String>, RankError> {
        Ok(Vec::new())
    }

    fn recomputed_units(&self) -> &[String] {
        &self.recomputed
    }

    fn half_products(&self) -> Option<String> {
        let has_kernels = TypeId::of::<Be>() == TypeId::of::<Flex>();
        let compute = self.config.sharding.precision.compute();
        let is_half = has_kernels && compute == Some(FloatDType::BF16);
        is_half.then(|| HalfProducts::chosen().to_string())
    }

    fn sample(&mut self) -> Result<Option<Vec<u8>>, RankError> {
        let (config, world) = (self.config, self.world);
        if !sample::is_wanted(config) {
            return Ok(None);
        }
        sample::generate(self.sharded()?, config, world)
    }
}
