//! The configuration of a training run, complete and valid: later stages need not handle errors in the user's input.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::tensor::{Device, FloatDType};
use burn_fsdp::internals::testing::Fault;
use burn_fsdp::{Check, Clip, Precision, ProcessGroup, Strategy};
use burn_fsdp_models::ModelConfig;

use crate::adapters::{AdapterSizes, Factors, TrainedAdapters};
use crate::args::{
    DataArgs, Float, NotFinite, ReplicateSize, StrategyArg, TrainArgs, TrainingArgs,
};
use crate::codec::Chosen;
use crate::console;
use crate::error::InputError;
use crate::output;
use crate::train::checks::{check_compiled, check_memory, check_reduction, check_size};
use crate::train::data::Data;
use crate::train::fault;
use crate::train::metrics::MetricFiles;
use crate::train::ranks::{Ranks, device_of};
use crate::train::recipe::Recipe;
use crate::train::resumed::Resumed;
use crate::train::run_folder::CheckpointConfig;
use crate::train::saved::{goes_on_in_bytes, with_packing};
use crate::train::schedule::Schedule;
use crate::train::settings::{Division, Settings};
use crate::train::sizes;
use crate::weights;

/// Default number of steps between evaluations on text.
const EVAL_EVERY: usize = 100;

/// The configuration of a training run.
#[derive(Debug)]
pub(crate) struct TrainConfig {
    pub(crate) model: ModelConfig,
    /// Tokens in a row of a batch. The model may support longer sequences.
    pub(crate) seq: usize,
    /// Adapters to train, with the weights frozen.
    pub(crate) adapters: Option<TrainedAdapters>,
    pub(crate) seed: u64,
    /// File or folder with the initial weights; if `None`, they are random.
    pub(crate) init: Option<PathBuf>,
    pub(crate) save_init: Option<PathBuf>,
    pub(crate) data: Data,
    /// Warnings about settings of the model's folder with which transformers trains differently.
    pub(crate) other_training: Vec<String>,
    pub(crate) eval_every: usize,
    pub(crate) eval_batches: usize,
    /// Sequences in a step, over all ranks; a multiple of `ranks`.
    pub(crate) batch: usize,
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    pub(crate) schedule: Schedule,
    /// Settings that are saved with a step, and compared when a run resumes from it.
    pub(crate) settings: Settings,
    pub(crate) not_finite: NotFinite,
    pub(crate) optimizer: Recipe,
    pub(crate) ranks: Ranks,
    /// Compute threads of each rank.
    pub(crate) threads: usize,
    /// The device of each rank of this process, without autodiff.
    pub(crate) devices: Vec<Device>,
    pub(crate) sharding: Sharding,
    pub(crate) step: StepConfig,
    /// True if a compiled step trains, false for the eager engine.
    pub(crate) is_compiled: bool,
    pub(crate) checkpoints: Option<CheckpointConfig>,
    /// Flag that a signal or the end of `launch` sets. The run then finishes the step, saves, and ends. `None` for a
    /// run without files to save or remove, which a signal ends like any other process.
    pub(crate) stop: Option<Arc<AtomicBool>>,
    pub(crate) deadline: Duration,
    /// What ranks compare in each collective operation.
    pub(crate) check: Check,
    pub(crate) fault: Option<Fault>,
    pub(crate) metrics: MetricFiles,
    pub(crate) trace: Option<PathBuf>,
    pub(crate) operations: Option<PathBuf>,
    pub(crate) dump_graphs: Option<PathBuf>,
    /// True to measure the rate of the machine's matrix products.
    pub(crate) measures_limits: bool,
    pub(crate) curve: PathBuf,
    pub(crate) sample_tokens: usize,
    pub(crate) json: bool,
}

/// The sharding of the model over the ranks.
#[derive(Debug)]
pub(crate) struct Sharding {
    /// The strategy's name in the report.
    pub(crate) name: &'static str,
    pub(crate) strategy: Strategy,
    /// Number of copies of the shards; 1 without hybrid sharding.
    pub(crate) replicas: usize,
    /// True if each machine has one copy of the shards.
    pub(crate) is_by_host: bool,
    pub(crate) prefetch: Option<usize>,
    /// Minimum number of parameters in a unit; if `None`, the blocks are the units.
    pub(crate) unit_size: Option<usize>,
    pub(crate) precision: Precision,
    /// Folder for the optimizer state, if it is not in memory.
    pub(crate) offload: Option<PathBuf>,
}

impl Sharding {
    fn division(&self, ranks: usize) -> Division {
        Division {
            strategy: self.name,
            replicas: self.replicas,
            ranks,
        }
    }
}

/// The configuration of one step.
#[derive(Debug)]
pub(crate) struct StepConfig {
    pub(crate) accumulate: usize,
    pub(crate) no_sync: bool,
    pub(crate) clip: Option<Clip>,
    pub(crate) scales_loss: bool,
    pub(crate) activation_checkpointing: bool,
    /// Number of parts in which a compiled step computes the loss.
    pub(crate) loss_chunks: usize,
    /// Memory budget of a compiled step, in bytes per rank.
    pub(crate) memory_budget: Option<u64>,
    /// True to prove a compiled plan before the first step.
    pub(crate) is_certified: bool,
}

impl TrainConfig {
    /// Resolves and checks all arguments. Cheap checks come first, and disk access comes last.
    pub(crate) fn from_args(args: TrainArgs) -> Result<Self, InputError> {
        let args = with_packing(args)?;
        let check = args.sharding.check.check(args.output.operations.is_some());
        let codec = codec(&args)?;
        let model = sizes::model(&args.model, &codec.codec)?;
        let adapters = sizes::adapters(&args.model, &model)?;
        let optimizer = Recipe::new(&args, &model)?;
        let all_ranks = Ranks::find(args.sharding.ranks)?;
        let threads = all_ranks.threads_of_each(args.sharding.threads)?;
        let (batch, ranks) = (args.training.batch, all_ranks.number());
        check_batch(batch, ranks, args.training.accumulate)?;
        let sharding = sharding(&args, &all_ranks)?;
        let (step, schedule) = (step(&args.training)?, Schedule::new(&args.training)?);
        if args.training.compile {
            check_compiled(&args)?;
        }
        check_size(&args)?;
        let fault = asked_fault(&args.training, &sharding, ranks)?;
        if args.training.device.is_host() {
            let held = (sharding.strategy, sharding.replicas);
            check_memory(&args, (&model, &optimizer), &all_ranks, held)?;
        }
        let data = Data::read(&args, codec, &model)?;
        let init = args.model.init.as_ref();
        init.map_or(Ok(()), |path| weights::check(&model, path))?;
        // Only one process writes shared files.
        let is_first = all_ranks.have_first();
        if let Some(folder) = sharding.offload.as_ref().filter(|_| is_first) {
            output::check_offload(folder, ranks)?;
        }
        if is_first {
            output::check(&args)?;
        }
        let settings = Settings::new(&args, &optimizer, &data, sharding.division(ranks));
        let is_init_idle = is_init_idle(&args);
        let own = adapters.as_ref().map(|adapters| &adapters.sizes);
        let state = (&model, own, &settings);
        let checkpoints = CheckpointConfig::new(args.checkpoint, &all_ranks, state)?;
        warn_of_idle(checkpoints.as_ref(), &args.training, is_init_idle);
        Ok(Self {
            other_training: sizes::other_training(&args.model, &model)?,
            stop: (checkpoints.is_some() || sharding.offload.is_some()).then(Arc::default),
            model,
            seq: args.model.seq,
            adapters,
            seed: args.model.seed,
            init: args.model.init,
            save_init: args.model.save_init,
            data,
            eval_every: eval_every(&args.data),
            eval_batches: args.data.eval_batches,
            batch,
            steps: args.training.steps,
            warmup: args.training.warmup,
            schedule,
            settings,
            not_finite: args.training.nan,
            optimizer,
            devices: all_ranks.devices(&args.training.device)?,
            ranks: all_ranks,
            threads,
            sharding,
            step,
            is_compiled: args.training.compile,
            checkpoints,
            // A longer deadline could overflow a clock, and no rank waits that long.
            deadline: Duration::from_secs(args.sharding.deadline.min(1 << 31)),
            check,
            fault,
            metrics: MetricFiles::of(&args.output),
            trace: args.output.trace,
            operations: args.output.operations,
            dump_graphs: args.output.dump_graphs,
            measures_limits: args.output.utilization,
            curve: args.output.curve,
            sample_tokens: args.output.sample,
            json: args.output.json,
        })
    }

    /// Returns the saved step that the run resumes from; `None` for a fresh run.
    pub(crate) fn resumed(&self) -> Option<&Resumed> {
        self.checkpoints.as_ref()?.resumed()
    }

    /// Returns the maximum duration of a save; zero if the run has no checkpoint folder.
    pub(crate) fn save_deadline(&self) -> Duration {
        let checkpoints = self.checkpoints.as_ref();
        checkpoints.map_or(Duration::ZERO, |checkpoints| checkpoints.save_deadline)
    }

    /// Returns true if a signal or the end of `launch` has told the run to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        let stop = self.stop.as_ref();
        stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// Returns the total number of steps, including the warmup.
    pub(crate) fn num_steps(&self) -> usize {
        self.warmup + self.steps
    }

    /// Returns the number of tokens in a step, over all ranks.
    pub(crate) fn tokens_per_step(&self) -> usize {
        self.batch * self.seq
    }

    /// Returns the sizes of the adapters, if nothing else is trained.
    pub(crate) fn adapter_sizes(&self) -> Option<&AdapterSizes> {
        self.adapters.as_ref().map(|adapters| &adapters.sizes)
    }

    /// Returns the initial values of the adapters, unless Burn draws them.
    pub(crate) fn factors(&self) -> Option<&Factors> {
        self.adapters.as_ref()?.factors.as_ref()
    }

    /// Returns the number of trained parameters: all parameters, or the adapters' factors.
    pub(crate) fn num_trained_params(&self) -> usize {
        let Some(adapters) = self.adapter_sizes() else {
            return self.model.num_params();
        };
        match self.model {
            ModelConfig::Gpt(sizes) => adapters.num_params(sizes),
            ModelConfig::Llama(sizes) => adapters.num_params(sizes),
            ModelConfig::Gpt2(sizes) => adapters.num_params(sizes),
        }
    }

    /// Returns the number of values that the optimizer keeps for the trained parameters.
    pub(crate) fn num_optimizer_values(&self) -> usize {
        match &self.adapters {
            None => self.optimizer.num_values(),
            // All factors are of the same kind.
            Some(_) => self.num_trained_params() * self.optimizer.values_of(""),
        }
    }

    /// Returns the number of sequences in a batch over all ranks, and the tokens in each sequence.
    pub(crate) fn batch_shape(&self) -> [usize; 2] {
        [self.batch, self.seq]
    }

    /// Returns the device, without autodiff, on which a rank of this process computes.
    pub(crate) fn device(&self, world: &ProcessGroup) -> Device {
        device_of(&self.devices, world.rank())
    }

    /// Returns a rank's rows of each global batch.
    pub(crate) fn rows_of(&self, rank: usize) -> std::ops::Range<usize> {
        let rows = self.batch / self.ranks.number();
        rank * rows..(rank + 1) * rows
    }

    /// Returns a rank's rows of each global batch in the micro-batch with number `micro`.
    pub(crate) fn micro_rows_of(&self, rank: usize, micro: usize) -> std::ops::Range<usize> {
        let rows = self.batch / self.ranks.number() / self.step.accumulate;
        let start = self.rows_of(rank).start + micro * rows;
        start..start + rows
    }

    /// Returns true if the run evaluates after this step, counted from 0.
    pub(crate) fn evaluates_after(&self, step: usize) -> bool {
        let is_last = step + 1 == self.num_steps();
        let is_due = self.eval_every > 0 && (step + 1).is_multiple_of(self.eval_every);
        self.eval_batches > 0 && (is_last || is_due)
    }
}

/// Returns the number of steps between evaluations; 0 for none.
fn eval_every(data: &DataArgs) -> usize {
    let default = if data.synthetic { 0 } else { EVAL_EVERY };
    data.eval_every.unwrap_or(default)
}

/// Returns true if a resumed run makes no use of `--init`. A run with adapters uses the weights, and a folder may
/// specify the model's sizes and tokenizer.
fn is_init_idle(args: &TrainArgs) -> bool {
    let path = args.model.init.as_ref();
    let has_adapters = args.model.lora.flag().is_some();
    path.is_some_and(|path| !has_adapters && !path.is_dir())
}

/// Warns if a resumed run trains no step, or does not use the weights of `--init`.
fn warn_of_idle(checkpoints: Option<&CheckpointConfig>, args: &TrainingArgs, is_init_idle: bool) {
    let steps = args.steps + args.warmup;
    let resumed = checkpoints.and_then(CheckpointConfig::resumed);
    if let Some(warning) = resumed.and_then(|resumed| resumed.idle(steps, is_init_idle)) {
        console::tell(format_args!("warning: {warning}"));
    }
}

/// Finds the codec: a tokenizer, or bytes.
fn codec(args: &TrainArgs) -> Result<Chosen, InputError> {
    let init = args.model.init.as_deref();
    init.map_or(Ok(()), weights::check_exists)?;
    if args.data.synthetic {
        return Ok(Chosen::none());
    }
    let given = args.data.tokenizer.as_ref();
    Chosen::find(given, init, || goes_on_in_bytes(&args.checkpoint))
}

/// Reads the fault that the environment requests.
fn asked_fault(
    training: &TrainingArgs,
    sharding: &Sharding,
    ranks: usize,
) -> Result<Option<Fault>, InputError> {
    let num_steps = training.steps.saturating_add(training.warmup);
    let is_offloaded = sharding.offload.is_some();
    let strategy = sharding.strategy;
    fault::from_environment(ranks, num_steps, training.compile, strategy, is_offloaded)
}

fn check_batch(batch: usize, ranks: usize, accumulate: usize) -> Result<(), InputError> {
    for (flag, size) in [
        ("--batch", batch),
        ("--ranks", ranks),
        ("--accumulate", accumulate),
    ] {
        if size == 0 {
            return Err(InputError::Zero { flag });
        }
    }
    if !batch.is_multiple_of(ranks) {
        return Err(InputError::RanksDoNotDivideBatch { ranks, batch });
    }
    if (batch / ranks).is_multiple_of(accumulate) {
        Ok(())
    } else {
        Err(InputError::MicroBatchesDoNotDivide {
            accumulate,
            rows: batch / ranks,
        })
    }
}

fn sharding(args: &TrainArgs, ranks: &Ranks) -> Result<Sharding, InputError> {
    let given = &args.sharding;
    let (name, strategy) = match given.strategy {
        StrategyArg::FullShard => ("full-shard", Strategy::FullShard),
        StrategyArg::ShardGradOp => ("shard-grad-op", Strategy::ShardGradOp),
        StrategyArg::NoShard => ("no-shard", Strategy::NoShard),
        StrategyArg::HybridShard => ("hybrid-shard", Strategy::FullShard),
    };
    let replicas = match (given.strategy, given.replicate_size) {
        (StrategyArg::HybridShard, size) => match size.unwrap_or(ReplicateSize::Number(2)) {
            ReplicateSize::Number(replicas) => replicas,
            ReplicateSize::Host if ranks.number().is_multiple_of(ranks.here()) => {
                ranks.number() / ranks.here()
            }
            ReplicateSize::Host => {
                return Err(InputError::UnevenHosts {
                    ranks: ranks.number(),
                    here: ranks.here(),
                });
            }
        },
        (_, Some(_)) => {
            return Err(InputError::Excludes {
                first: "--replicate-size",
                second: "a strategy other than hybrid-shard",
                reason: "only hybrid-shard copies shards",
            });
        }
        (_, None) => 1,
    };
    if replicas == 0 || !ranks.number().is_multiple_of(replicas) {
        return Err(InputError::ReplicasDoNotDivideRanks {
            replicas,
            ranks: ranks.number(),
        });
    }
    if given.deadline == 0 {
        return Err(InputError::Zero { flag: "--deadline" });
    }
    if given.unit_size == Some(0) {
        return Err(InputError::Zero {
            flag: "--unit-size",
        });
    }
    check_reduction(args)?;
    let mut precision = match float(args.training.precision) {
        None => Precision::default(),
        Some(compute) => Precision::new(compute),
    };
    if let Some(reduce) = args.training.reduce_dtype {
        precision = precision.reduce(float(reduce).unwrap_or(FloatDType::F32));
    }
    Ok(Sharding {
        name,
        strategy,
        replicas,
        is_by_host: given.strategy == StrategyArg::HybridShard
            && given.replicate_size == Some(ReplicateSize::Host),
        prefetch: given.prefetch,
        unit_size: given.unit_size,
        precision,
        offload: given.offload.clone(),
    })
}

/// Returns the dtype for a precision; `None` for f32, in which the model is built.
fn float(float: Float) -> Option<FloatDType> {
    match float {
        Float::F32 => None,
        Float::Bf16 => Some(FloatDType::BF16),
        Float::F16 => Some(FloatDType::F16),
    }
}

fn step(args: &TrainingArgs) -> Result<StepConfig, InputError> {
    if let Some(value) = args.clip_grad_norm
        && !(value.is_finite() && value > 0.0)
    {
        return Err(InputError::OutOfRange {
            flag: "--clip-grad-norm",
            value,
            expected: "a number above 0",
        });
    }
    if args.loss_chunks == 0 {
        return Err(InputError::Zero {
            flag: "--loss-chunks",
        });
    }
    Ok(StepConfig {
        accumulate: args.accumulate,
        no_sync: args.no_sync,
        clip: args.clip_grad_norm.map(Clip::to),
        scales_loss: args.precision == Float::F16,
        activation_checkpointing: args.activation_checkpointing,
        loss_chunks: args.loss_chunks,
        memory_budget: args.memory_budget,
        is_certified: args.certify,
    })
}
