//! The `burn-fsdp generate` command.
//!
//! - `model`: its configuration and weights. `memory`: where the weights are, and the memory that prompts need.
//! - `prompts`: the prompts as tokens. `answers`: their printed answers.

mod answers;
mod memory;
mod model;
mod prompts;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{DispatchKindConversion, DispatchTensor, Flex};
use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp::internals::checkpoint::{Step, restore_matching};
use burn_fsdp::internals::collectives::Fingerprint;
use burn_fsdp::internals::compile::BackendIr;
use burn_fsdp::internals::sharding::fully_shard_from;
use burn_fsdp::internals::state::unsharded;
use burn_fsdp::{LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, launch};
use burn_fsdp_models::{Architecture, ModelConfig, TextCodec, WeightsFile};
use parking_lot::Mutex;

use crate::adapters::{AdapterSizes, Adapters, is_factor};
use crate::args::GenerateArgs;
use crate::choice::Choice;
use crate::codec::{self, Chosen};
use crate::console;
use crate::error::{Failure, InputError, PromptError, RankError};
use crate::steps::open::with_step;
use crate::text::{Cached, Generated, PlacedDecoder, Prompt, Sample};
use crate::train::{Ranks, agree, device_of, tokenizer_of};
use crate::weights;
use memory::Residence;
pub(super) use model::{adapted_model, model_of_folder};
use model::{of_file, of_step, step_region, unknown, unread, whole_model};
use prompts::GivenPrompt;

/// The input of the ranks that generate.
struct Job {
    args: GenerateArgs,
    model: ModelConfig,
    adapters: Option<AdapterSizes>,
    step: Option<Step>,
    codec: TextCodec,
    /// Ids of the tokens that end a text.
    ends: Vec<u32>,
    /// Texts before which a text ends.
    stops: Vec<String>,
    prompts: Vec<Prompt>,
    /// The device of each rank of this process.
    devices: Vec<Device>,
    residence: Residence,
    /// True if each rank is a process, which has read the prompts itself.
    are_processes: bool,
}

/// The whole models that ranks of this process have read, each with its device. Ranks on one device share a model.
type Shared<M> = Mutex<Vec<(Device, M)>>;

/// Prints the prompts and the texts that the model adds to them.
pub(crate) fn run(args: GenerateArgs) -> Result<(), Failure> {
    check(&args)?;
    let ranks = Ranks::find_or(args.place.ranks, || 1)?;
    let threads = ranks.threads_of_each(args.place.threads)?;
    let given = prompts::read(&args.prompts).map_err(InputError::from)?;
    let (job, generated) = match &args.step {
        None => on_ranks(Job::new(args, None, &given, &ranks)?, &ranks, threads),
        Some(path) => with_step(path, |step| {
            let job = Job::new(args.clone(), Some(step), &given, &ranks)?;
            on_ranks(job, &ranks, threads)
        }),
    }?;
    if ranks.have_first() {
        answers::print(
            &job.args.prompts,
            &given,
            &job.prompts,
            &job.sample(&Device::flex()),
            &generated,
        )
    } else {
        Ok(())
    }
}

/// Warns about settings in the folder that would make transformers choose other tokens.
fn warn_of_rules(folder: &Path, args: &GenerateArgs) -> Result<(), InputError> {
    let mut rules = ModelConfig::generation_rules(folder)?;
    // The user chose these.
    rules.retain(|rule| match *rule {
        "repetition_penalty" => args.choice.repetition_penalty == 1.0,
        "stop_strings" => args.stop.is_empty(),
        _ => true,
    });
    if !rules.is_empty() {
        let rules = rules.join(", ");
        console::tell(format_args!(
            "warning: the text may differ from the text of transformers, which applies {rules} of \
             generation_config.json; here only flags choose tokens, such as --repetition-penalty and --stop"
        ));
    }
    Ok(())
}

fn check(args: &GenerateArgs) -> Result<(), InputError> {
    let zeros = [
        ("--ranks", args.place.ranks == Some(0)),
        ("--deadline", args.place.deadline == 0),
        ("--top-k", args.choice.top_k == Some(0)),
        ("--batch", args.prompts.batch == 0),
    ];
    if let Some((flag, _)) = zeros.into_iter().find(|(_, is_zero)| *is_zero) {
        return Err(InputError::Zero { flag });
    }
    if args.stop.iter().any(String::is_empty) {
        return Err(PromptError::EmptyStop.into());
    }
    let (temperature, top_p) = (args.choice.temperature, args.choice.top_p);
    let penalty = args.choice.repetition_penalty;
    let ranges = [
        (
            "--temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "a number of at least 0",
        ),
        (
            "--top-p",
            top_p,
            top_p > 0.0 && top_p <= 1.0,
            "a number above 0 and at most 1",
        ),
        (
            "--repetition-penalty",
            penalty,
            penalty.is_finite() && penalty > 0.0,
            "a number above 0",
        ),
    ];
    match ranges.into_iter().find(|(.., is_valid, _)| !is_valid) {
        None => Ok(()),
        Some((flag, value, _, expected)) => Err(InputError::OutOfRange {
            flag,
            value,
            expected,
        }),
    }
}

fn on_ranks(job: Job, ranks: &Ranks, threads: usize) -> Result<(Arc<Job>, Generated), Failure> {
    let deadline = Duration::from_secs(job.args.place.deadline.min(1 << 31));
    let config = LaunchConfig::new(ranks.number())
        .threads_per_rank(threads)
        .without_background()
        .deadline(deadline);
    let job = Arc::new(job);
    let generated = match job.model {
        ModelConfig::Gpt(sizes) => on_ranks_of(config, &job, sizes),
        ModelConfig::Llama(sizes) => on_ranks_of(config, &job, sizes),
        ModelConfig::Gpt2(sizes) => on_ranks_of(config, &job, sizes),
    }?;
    // Every rank has all answers.
    let generated = generated.into_iter().next().unwrap_or_default();
    Ok((job, generated))
}

fn on_ranks_of<A: Architecture>(
    config: LaunchConfig,
    job: &Arc<Job>,
    sizes: A,
) -> Result<Vec<Generated>, Failure> {
    let job = Arc::clone(job);
    let shared = Shared::<A::Model>::default();
    Ok(launch(config, move |world| {
        job.generate(sizes, &world, &shared)
    })?)
}

impl Job {
    /// Finds the model. Checks all files before any rank starts.
    fn new(
        args: GenerateArgs,
        step: Option<Step>,
        given: &[GivenPrompt],
        ranks: &Ranks,
    ) -> Result<Self, InputError> {
        let training = step.as_ref().map(|step| &step.index().training);
        let adapters = training.and_then(Adapters::of_step);
        let adapters = adapters.map(|adapters| adapters.sizes);
        let has_adapters = adapters.is_some();
        let model = match (&step, &args.init) {
            (Some(step), None) => whole_model(step, has_adapters)?,
            (None, Some(folder)) => model_of_folder(folder)?,
            (Some(step), Some(folder)) => adapted_model(step, has_adapters, folder)?,
            (None, None) => return Err(InputError::NoModel),
        };
        if let (Some(step), Some(adapters)) = (&step, &adapters)
            && !adapters.is_valid(&model)
        {
            return Err(unknown(step.path(), format!("it has {adapters:?}")));
        }
        let codec = codec(&args, step.as_ref(), &model, ranks.have_first())?;
        let encoded = prompts::encoded(given, &codec, args.prompts.chat, model.seq())?;
        let lengths = encoded.tokens.iter();
        let lengths: Vec<_> = lengths
            .map(|tokens| tokens.len().saturating_add(args.tokens))
            .collect();
        let batch = args.prompts.batch;
        let of_model = (&model, adapters.as_ref());
        let residence = if args.place.device.is_host() {
            memory::residence(args.place.weights, of_model, ranks, &lengths, batch)?
        } else {
            memory::residence_on_gpu(args.place.weights, of_model)?
        };
        if let Some(folder) = &args.init
            && ranks.have_first()
        {
            warn_of_rules(folder, &args)?;
        }
        let of_folder = args.init.as_ref().map(ModelConfig::ends_of_text);
        let mut ends = of_folder.transpose()?.unwrap_or_default();
        ends.extend(encoded.ends);
        for stop in &args.stop {
            // Such a token is not in the decoded text.
            ends.extend(codec::special(&codec, stop)?);
        }
        let seed = args.seed;
        let prompts = encoded.tokens.into_iter().zip(0..);
        let prompts = prompts.map(|(tokens, index)| Prompt {
            tokens,
            seed: seed.wrapping_add(index),
        });
        Ok(Self {
            stops: [&args.stop[..], &encoded.stops].concat(),
            prompts: prompts.collect(),
            devices: ranks.devices(&args.place.device)?,
            residence,
            are_processes: ranks.are_processes(),
            args,
            model,
            adapters,
            step,
            codec,
            ends,
        })
    }

    /// Generates on one rank, and returns all answers. Collective.
    fn generate<A: Architecture>(
        &self,
        sizes: A,
        world: &ProcessGroup,
        shared: &Shared<A::Model>,
    ) -> Result<Generated, RankError> {
        if self.are_processes {
            let prompts = format!("{:?}", self.prompts);
            let hash = Fingerprint::of(prompts.as_bytes());
            agree(
                world,
                format!("{} prompts, hash {hash:016x}", self.prompts.len()),
            )?;
        }
        let device = device_of(&self.devices, world.rank());
        let sample = self.sample(&device);
        let batch = self.args.prompts.batch;
        let residence = self.residence_of_all(world)?;
        if residence == Residence::Placed {
            return self.generate_placed(sizes, &sample, world);
        }
        let model = if residence == Residence::Whole {
            // The first rank of a process reads the weights. The others wait for it here, where there is no deadline.
            let mut shared = shared.lock();
            match shared.iter().find(|(on, _)| *on == device) {
                Some((_, model)) => model.clone(),
                None => {
                    let model = self.whole(sizes, &device)?;
                    shared.push((device.clone(), model.clone()));
                    model
                }
            }
        } else {
            self.read(sizes, world, Strategy::FullShard, &device)?
                .valid()
        };
        let mut decoder = Cached::new(&model, &sample);
        sample.continue_all(&mut decoder, &self.prompts, batch, world, || false)
    }

    /// Returns where the weights of all processes are. If processes of unequal memory chose differently, weights are
    /// sharded, which needs the least. Collective.
    fn residence_of_all(&self, world: &ProcessGroup) -> Result<Residence, RankError> {
        let own = match self.residence {
            Residence::Whole => 2,
            Residence::Placed => 1,
            Residence::Sharded => 0,
        };
        let notes = world.exchange("residence of the weights", vec![own])?;
        let is_own = notes.iter().all(|note| note[..] == [own]);
        Ok(if is_own {
            self.residence
        } else {
            Residence::Sharded
        })
    }

    /// Generates with weights that are divided among the ranks and do not move. Collective.
    fn generate_placed<A: Architecture>(
        &self,
        sizes: A,
        sample: &Sample<'_>,
        world: &ProcessGroup,
    ) -> Result<Generated, RankError> {
        #[cfg(any(
            feature = "wgpu",
            feature = "vulkan",
            feature = "metal",
            feature = "webgpu",
            feature = "cuda",
            feature = "rocm"
        ))]
        if let burn::backend::DispatchDevice::Cube(on) = sample.device.as_dispatch() {
            let on = on.clone();
            return self.generate_placed_on::<A, burn::backend::Cube>(sizes, sample, world, on);
        }
        self.generate_placed_on::<A, Flex>(sizes, sample, world, Default::default())
    }

    fn generate_placed_on<A: Architecture, Be: BackendIr>(
        &self,
        sizes: A,
        sample: &Sample<'_>,
        world: &ProcessGroup,
        on: Be::Device,
    ) -> Result<Generated, RankError>
    where
        DispatchTensor: DispatchKindConversion<Be>,
    {
        let weights = match &self.args.init {
            Some(folder) => Some(WeightsFile::open(folder, sizes)?),
            None => None,
        };
        let batch = self.args.prompts.batch;
        let rows = batch.min(self.prompts.len());
        let of = (sizes, &self.model);
        let mut decoder = PlacedDecoder::<Be>::new(of, sample, rows, world, on, |part| {
            let (path, region) = (&*part.whole.path, &part.region);
            match (&weights, &self.step) {
                (Some(weights), _) => weights::read_region(weights, path, region),
                (None, Some(step)) => step_region(step, path, &part.whole.shape, region),
                (None, None) => Err(Box::new(InputError::NoModel).into()),
            }
        })?;
        sample.continue_all(&mut decoder, &self.prompts, batch, world, || false)
    }

    /// Returns the model without shards.
    fn whole<A: Architecture>(&self, sizes: A, device: &Device) -> Result<A::Model, RankError> {
        // A parameter that is not sharded becomes a tensor of the plain module without a copy.
        let model = self.read(sizes, &ProcessGroup::solo(), Strategy::NoShard, device)?;
        let whole = unsharded(&model, true)?;
        Ok(whole.expect("a rank that keeps the whole model has it"))
    }

    /// Returns the model with the parameters that this rank of `group` holds. A unit is gathered only while it is used, so
    /// at most one unit is gathered at a time. Collective.
    fn read<A: Architecture>(
        &self,
        sizes: A,
        group: &ProcessGroup,
        strategy: Strategy,
        device: &Device,
    ) -> Result<A::Model, RankError> {
        let device = device.clone().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(group, Mesh::line("shard", group.size())?)?;
        let mut policy = ShardPolicy::new().units([A::BLOCKS]);
        policy = policy.strategy(strategy).reshard_root(true).prefetch(0);
        if let Some(adapters) = &self.adapters {
            policy = adapters.attached_by(policy, sizes);
        }
        let blank = sizes.blank(&device)?;
        let mut model = match (&self.args.init, &self.step) {
            (Some(folder), _) => {
                let weights = WeightsFile::open(folder, sizes)?;
                fully_shard_from(blank, &mesh, policy, |part| of_file(&weights, part))?
            }
            (None, Some(step)) => {
                fully_shard_from(blank, &mesh, policy, |part| of_step(step, part))?
            }
            (None, None) => return Err(Box::new(InputError::NoModel).into()),
        };
        if let (Some(step), Some(adapters)) = (&self.step, &self.adapters) {
            Adapters::of(adapters, &model, &mesh)?.check(&step.index().training)?;
            let restored = restore_matching(model, step, is_factor);
            model = restored.map_err(|error| unread(step, error))?;
        }
        Ok(model)
    }

    fn sample(&self, device: &Device) -> Sample<'_> {
        Sample {
            codec: &self.codec,
            seq: self.model.seq(),
            num_tokens: self.args.tokens,
            ends: self.ends.clone(),
            stops: self.stops.clone(),
            choice: Choice {
                repetition_penalty: self.args.choice.repetition_penalty,
                temperature: self.args.choice.temperature,
                top_k: self.args.choice.top_k,
                top_p: self.args.choice.top_p,
            },
            device: device.clone(),
        }
    }
}

/// Finds the codec, which must be the one that the step was trained with. If there are several processes, only the
/// first prints warnings.
fn codec(
    args: &GenerateArgs,
    step: Option<&Step>,
    model: &ModelConfig,
    is_first: bool,
) -> Result<TextCodec, InputError> {
    let saved = step.map(|step| tokenizer_of(&step.index().training));
    let are_bytes = saved == Some(None);
    let chosen = Chosen::find(args.tokenizer.as_ref(), args.init.as_deref(), || are_bytes)?;
    chosen.codec.check_vocab(model.vocab())?;
    match (step, saved) {
        (Some(step), Some(saved)) if !codec::is_of(&chosen.codec, saved) => {
            let given = codec::identity(&chosen.codec);
            return Err(InputError::OtherTokenizer {
                path: step.path().to_owned(),
                found: saved.unwrap_or("bytes").chars().take(100).collect(),
                given: given.unwrap_or_else(|| "bytes".to_owned()),
            });
        }
        _ => {}
    }
    // A saved step already specifies its tokens.
    let of_init = args.init.as_ref().filter(|_| step.is_none());
    let warnings = chosen.warnings(of_init.map(|_| model)).into_iter();
    for warning in warnings.filter(|_| is_first) {
        console::tell(format_args!("warning: {warning}"));
    }
    Ok(chosen.codec)
}
