//! The `burn-fsdp generate` command.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp::internals::checkpoint::{
    Dtype, ExpectedTensor, Extra, Step, TensorKind, restore_matching,
};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::sharding::{InitialPart, fully_shard_from};
use burn_fsdp::{LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, launch};
use burn_fsdp_models::{Architecture, ModelConfig, TextCodec, WeightsFile};

use crate::adapters::error::AdapterError;
use crate::adapters::{AdapterSizes, Adapters, is_factor};
use crate::args::GenerateArgs;
use crate::choice::Choice;
use crate::codec::{self, Chosen};
use crate::console;
use crate::error::{Failure, InputError, RankError};
use crate::host;
use crate::steps::open::with_step;
use crate::text::{Sample, printable};
use crate::train::{Ranks, tokenizer_of};
use crate::weights;

/// The input of the ranks that generate.
struct Job {
    args: GenerateArgs,
    model: ModelConfig,
    adapters: Option<AdapterSizes>,
    step: Option<Step>,
    codec: TextCodec,
    /// Ids of the tokens that end the text, from the --init folder.
    ends: Vec<u32>,
    prompt: Vec<i64>,
}

/// Prints the prompt and the text that the model adds to it.
pub(crate) fn run(args: GenerateArgs) -> Result<(), Failure> {
    check(&args)?;
    let ranks = Ranks::find_or(args.ranks, || 1)?;
    let threads = ranks.threads_of_each(args.threads)?;
    let text = match &args.step {
        None => on_ranks(Job::new(args, None, &ranks)?, &ranks, threads),
        Some(path) => with_step(path, |step| {
            on_ranks(Job::new(args.clone(), Some(step), &ranks)?, &ranks, threads)
        }),
    }?;
    if ranks.have_first() {
        console::answer(printable(&text))
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
    if args.prompt.is_empty() {
        return Err(InputError::EmptyPrompt);
    }
    let zeros = [
        ("--ranks", args.ranks == Some(0)),
        ("--deadline", args.deadline == 0),
        ("--top-k", args.choice.top_k == Some(0)),
    ];
    if let Some((flag, _)) = zeros.into_iter().find(|(_, is_zero)| *is_zero) {
        return Err(InputError::Zero { flag });
    }
    if args.stop.iter().any(String::is_empty) {
        return Err(InputError::EmptyStop);
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

fn on_ranks(job: Job, ranks: &Ranks, threads: usize) -> Result<Vec<u8>, Failure> {
    let deadline = Duration::from_secs(job.args.deadline.min(1 << 31));
    let config = LaunchConfig::new(ranks.number())
        .threads_per_rank(threads)
        .without_background()
        .deadline(deadline);
    let job = Arc::new(job);
    let texts = launch(config, move |world| match job.model {
        ModelConfig::Gpt(sizes) => job.generate(sizes, &world),
        ModelConfig::Llama(sizes) => job.generate(sizes, &world),
        ModelConfig::Gpt2(sizes) => job.generate(sizes, &world),
    })?;
    Ok(texts.into_iter().next().unwrap_or_default())
}

impl Job {
    /// Finds the model. Checks all files before any rank starts.
    fn new(args: GenerateArgs, step: Option<Step>, ranks: &Ranks) -> Result<Self, InputError> {
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
        let prompt = codec::prompt(&codec, &args.prompt)?;
        check_memory(&model, ranks, prompt.len().saturating_add(args.tokens))?;
        if let Some(folder) = &args.init
            && ranks.have_first()
        {
            warn_of_rules(folder, &args)?;
        }
        let ends = args.init.as_ref().map(ModelConfig::ends_of_text);
        let mut ends = ends.transpose()?.unwrap_or_default();
        for stop in &args.stop {
            // Such a token is not in the decoded text.
            ends.extend(codec::special(&codec, stop)?);
        }
        if prompt.is_empty() {
            Err(InputError::EmptyPrompt)
        } else {
            Ok(Self {
                args,
                model,
                adapters,
                step,
                codec,
                ends,
                prompt,
            })
        }
    }

    /// Generates on one rank. A unit is gathered only while it is used, so at most one unit is whole at a time.
    /// Collective.
    fn generate<A: Architecture>(
        &self,
        sizes: A,
        world: &ProcessGroup,
    ) -> Result<Vec<u8>, RankError> {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
        let mut policy = ShardPolicy::new().units([A::BLOCKS]);
        policy = policy.reshard_root(true).prefetch(0);
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
        let sample = Sample {
            codec: &self.codec,
            seq: self.model.seq(),
            num_tokens: self.args.tokens,
            ends: self.ends.clone(),
            seed: self.args.seed,
            stops: self.args.stop.clone(),
            choice: Choice {
                repetition_penalty: self.args.choice.repetition_penalty,
                temperature: self.args.choice.temperature,
                top_k: self.args.choice.top_k,
                top_p: self.args.choice.top_p,
            },
            device: Device::flex(),
        };
        sample.go_on(&model.valid(), self.prompt.clone(), world, || false)
    }
}

/// Reads this rank's part of a parameter from a folder. Adapters' factors come from the step.
fn of_file<A: Architecture>(
    weights: &WeightsFile<A>,
    part: &InitialPart<'_>,
) -> Result<Option<Vec<u8>>, RankError> {
    if is_factor(part.path) {
        return Ok(None);
    }
    let values = weights.read(part.path, part.range.clone())?;
    Ok(Some(
        values.into_iter().flat_map(f32::to_ne_bytes).collect(),
    ))
}

/// Reads this rank's part of a parameter from a step.
fn of_step(step: &Step, part: &InitialPart<'_>) -> Result<Option<Vec<u8>>, RankError> {
    let expected = ExpectedTensor {
        name: part.path.to_owned(),
        shape: part.shape.to_vec(),
        dtype: Some(Dtype::F32),
    };
    let read = || {
        step.compare(&[expected], |_| false, Extra::Ignore)?;
        step.read(part.path, &Region::Flat(part.range.clone()))
    };
    Ok(Some(read().map_err(|error| unread(step, error))?))
}

fn unread(step: &Step, error: impl Into<RankError>) -> RankError {
    RankError::Restore {
        path: step.path().to_owned(),
        source: Box::new(error.into()),
    }
}

/// Returns the model of a Hugging Face folder, which must have the weights.
pub(super) fn model_of_folder(folder: &Path) -> Result<ModelConfig, InputError> {
    let model = ModelConfig::from_hugging_face(folder)?;
    weights::check(&model, folder)?;
    Ok(model)
}

/// Returns the base model of a step's adapters, from its folder.
pub(super) fn adapted_model(
    step: &Step,
    has_adapters: bool,
    folder: &Path,
) -> Result<ModelConfig, InputError> {
    if !has_adapters {
        return Err(InputError::Excludes {
            first: "--init",
            second: "a step of a whole model",
            reason: "the step contains the weights",
        });
    }
    let (model, saved) = (model_of_folder(folder)?, sizes_of(step)?);
    if model == saved {
        Ok(model)
    } else {
        Err(InputError::other_model(step, &model, Some(&saved)))
    }
}

/// Returns the configuration in the index, if the step's tensors match that model.
///
/// The index may come from anyone, and its configuration may describe a model of any size. The size of the tensors is
/// bounded by the files, so it is compared before a model is created.
fn whole_model(step: &Step, has_adapters: bool) -> Result<ModelConfig, InputError> {
    let unknown = |problem: String| unknown(step.path(), problem);
    if has_adapters {
        let path = step.path().to_owned();
        return Err(AdapterError::Alone { path }.into());
    }
    let model = sizes_of(step)?;
    step.check_sizes()?;
    let tensors = step.index().tensors.iter();
    let parameters: Vec<_> = tensors
        .filter(|tensor| tensor.kind == TensorKind::Parameter)
        .collect();
    let elements: usize = parameters.iter().map(|tensor| tensor.num_elements()).sum();
    // Compare the number of elements first: it bounds the number of parameters.
    if elements != model.num_params() || parameters.len() != model.parameters()?.len() {
        return Err(unknown(format!(
            "its model would have {} parameters, but {elements} in {} tensors are saved",
            model.num_params(),
            parameters.len()
        )));
    }
    Ok(model)
}

fn sizes_of(step: &Step) -> Result<ModelConfig, InputError> {
    let model = serde_json::from_value::<ModelConfig>(step.index().model.clone());
    let model = model.map_err(|error| unknown(step.path(), error.to_string()))?;
    model.validate()?;
    Ok(model)
}

fn unknown(path: &Path, problem: String) -> InputError {
    let path = PathBuf::from(path);
    InputError::UnknownModel { path, problem }
}

/// Checks that this process has memory for its ranks' shards, one full unit, and the keys and values of `tokens`.
fn check_memory(model: &ModelConfig, ranks: &Ranks, tokens: usize) -> Result<(), InputError> {
    let Some(available) = host::memory_bytes(ranks.processes_here()) else {
        return Ok(());
    };
    const GIB: u128 = 1 << 30;
    const ELEMENT: u128 = 4;
    let params = model.num_params();
    let shards = ELEMENT * params.div_ceil(ranks.number()) as u128;
    let unit = ELEMENT * largest_unit(model)? as u128;
    let seen = tokens.min(model.seq()) as u128;
    let width = match model {
        ModelConfig::Llama(sizes) => sizes.kv_heads * sizes.head_dim(),
        ModelConfig::Gpt(_) | ModelConfig::Gpt2(_) => model.dim(),
    };
    let cache = 2 * ELEMENT * (model.num_layers() as u128) * (width as u128) * seen;
    let needed = (shards + unit + cache).saturating_mul(ranks.of_process() as u128);
    let available = u128::from(available);
    if needed > available {
        Err(InputError::TooLittleMemory {
            params,
            ranks: ranks.number(),
            needed: needed.div_ceil(GIB),
            available: available / GIB,
        })
    } else {
        Ok(())
    }
}

/// Returns the number of elements of the largest unit: a block, or the parameters outside all blocks.
fn largest_unit(model: &ModelConfig) -> Result<usize, InputError> {
    let mut units: BTreeMap<String, usize> = BTreeMap::new();
    for spec in model.parameters()? {
        let block = spec.path.split('.').take(2).collect::<Vec<_>>();
        let unit = match block[..] {
            [list, index] if index.parse::<usize>().is_ok() => format!("{list}.{index}"),
            _ => String::new(),
        };
        *units.entry(unit).or_default() += spec.shape.iter().product::<usize>();
    }
    Ok(units.into_values().max().unwrap_or_default())
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

#[cfg(test)]
mod tests {
    use burn_fsdp_models::{GptConfig, LlamaConfig};

    use super::*;

    #[test]
    fn the_largest_unit_is_a_block_or_the_root() {
        let sizes = |vocab| GptConfig {
            vocab,
            seq: 8,
            layers: 3,
            dim: 16,
            heads: 2,
        };
        // The difference between three blocks and two is one block.
        let of = |layers| ModelConfig::Gpt(GptConfig { layers, ..sizes(5) }).num_params();
        let block = of(3) - of(2);
        assert_eq!(largest_unit(&ModelConfig::Gpt(sizes(5))).ok(), Some(block));
        let wide = ModelConfig::Gpt(sizes(9_000));
        let root = wide.num_params() - 3 * block;
        assert!(root > block);
        assert_eq!(largest_unit(&wide).ok(), Some(root));
        let llama = LlamaConfig::preset("7b").expect("a preset");
        let one = ModelConfig::Llama(LlamaConfig { layers: 1, ..llama }).num_params();
        let two = ModelConfig::Llama(LlamaConfig { layers: 2, ..llama }).num_params();
        let largest = largest_unit(&ModelConfig::Llama(llama)).ok();
        assert_eq!(largest, Some((two - one).max(one - (two - one))));
    }
}
