//! The settings that affect a run's numbers, in addition to its model. They are saved with each step, and compared when
//! a run resumes from it.

use burn_fsdp::internals::checkpoint::TrainingState;
use serde_json::{Map, Value, json};

use crate::args::{
    CheckpointArgs, DataArgs, Float, LrSchedule, ModelArgs, OptimizerName, OutputArgs, PackingArg,
    ShardingArgs, TrainArgs, TrainingArgs,
};
use crate::error::InputError;
use crate::train::data::Data;
use crate::train::documents;
use crate::train::recipe::{NO_DECAY, OPTIMIZER, Recipe};

/// Name of the settings' section in a saved step.
const SECTION: &str = "settings";

/// Name of the setting that identifies the training data.
const DATA: &str = "data";

/// Name of the setting that identifies the tokenizer, `null` for bytes.
const TOKENIZER: &str = "tokenizer";

/// The flag for how documents share sequences.
const PACKING: &str = "--packing";

/// The flag for the type in which gradients are reduced.
const REDUCE_DTYPE: &str = "--reduce-dtype";

/// The setting of the step at which a learning-rate schedule ends.
const LAST_STEP: &str = "--warmup and --steps";

/// Returns the tokenizer of the text that a step was trained on; `None` for bytes, and if the step does not specify it.
pub(crate) fn tokenizer_of(saved: &TrainingState) -> Option<&str> {
    saved.sections.get(SECTION)?.get(TOKENIZER)?.as_str()
}

/// Returns how documents shared sequences before a step was saved; `None` for a step that was not trained on documents.
pub(crate) fn packing_of(saved: &TrainingState) -> Option<PackingArg> {
    let position = saved.sections.get(documents::SECTION)?;
    let settings = saved.sections.get(SECTION);
    if let Some(packing) = settings.and_then(|settings| settings.get(PACKING)) {
        return serde_json::from_value(packing.clone()).ok();
    }
    // Earlier versions had no choice.
    let of_stream = position.get("settings")?.get("the packing")?;
    Some(if of_stream == "OneDocument" {
        PackingArg::Single
    } else {
        PackingArg::Joined
    })
}

/// The sharding of a step over the ranks, as resolved from the flags.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    /// Name of the strategy.
    pub(crate) strategy: &'static str,
    /// Copies of the shards.
    pub(crate) replicas: usize,
    pub(crate) ranks: usize,
}

/// The settings by flag, as specified or by default, and the tokenizer as earlier versions saved it.
#[derive(Debug, Clone)]
pub(crate) struct Settings(Map<String, Value>, Value);

impl Settings {
    /// Collects the settings. Every flag is listed here: code with a new flag does not compile until its author decides
    /// whether batches or numbers depend on it. Steps that were written before a setting was compared do not contain
    /// it.
    pub(crate) fn new(
        args: &TrainArgs,
        optimizer: &Recipe,
        data: &Data,
        division: Division,
    ) -> Self {
        let TrainArgs {
            // Only the flags that they contain matter.
            config: _,
            print_config: _,
            model,
            data: of_data,
            training,
            sharding,
            checkpoint,
            output,
        } = args;
        let mut all = Map::new();
        all.extend(of_model(model));
        all.extend(of_training(training));
        all.extend(optimizer.settings());
        all.extend(of_sums(sharding, division));
        all.insert(DATA.to_owned(), json!(data.identity()));
        all.insert(TOKENIZER.to_owned(), json!(data.tokenizer()));
        let documents = data.documents();
        all.extend(documents.map(|of| (PACKING.to_owned(), json!(of.packing))));
        no_number_depends_on(of_data, checkpoint, output);
        Self(all, json!(data.former_tokenizer()))
    }

    /// Adds the settings to the state that is saved.
    pub(crate) fn save_into(&self, training: &mut TrainingState) {
        let settings = Value::Object(self.0.clone());
        training.sections.insert(SECTION.to_owned(), settings);
    }

    /// Rejects a step that was saved with another optimizer, because its state does not fit this run's optimizer.
    pub(crate) fn check_optimizer(&self, saved: &TrainingState) -> Result<(), InputError> {
        // A step of another program does not identify its optimizer, except by the names of the state, which are
        // checked when the state is restored.
        let Some(was) = saved.sections.get(SECTION).and_then(Value::as_object) else {
            return Ok(());
        };
        let was = with_former_optimizer(was.clone());
        match (&was[OPTIMIZER], &self.0[OPTIMIZER]) {
            (was, own) if was == own => Ok(()),
            (was, own) => Err(InputError::OtherOptimizer {
                step: saved.step,
                found: shortened(was),
                expected: shortened(own),
            }),
        }
    }

    /// Returns one sentence for each setting that differs from the saved step.
    pub(crate) fn differences(&self, saved: &TrainingState) -> Vec<String> {
        let step = saved.step;
        let was = match saved.sections.get(SECTION) {
            Some(Value::Object(was)) => was.clone(),
            // The step was saved before this section existed, or by another program.
            _ => older(saved),
        };
        // There was only one optimizer in earlier versions.
        let mut was = with_former_optimizer(was);
        was.extend(packing_of(saved).map(|packing| (PACKING.to_owned(), json!(packing))));
        let rounds = is_rounded(&self.0) || is_rounded(&was);
        let own = self.0.iter();
        let own = own.filter(|(name, _)| rounds || !OF_SUMS.contains(&name.as_str()));
        let changed = own.filter_map(|(name, own)| {
            let was = was.get(name)?;
            let is_former = name == TOKENIZER && *was == self.1;
            (!is_same(was, own) && !is_former).then_some((name, was, own))
        });
        let mut sentences: Vec<_> = changed
            .map(|(name, was, own)| {
                let own = shortened(own);
                let was = shortened(was);
                let name = flag_of(name);
                format!("{name} is {own}, but was {was} when step {step} was saved")
            })
            .collect();
        if saved.sections.contains_key(documents::SECTION) {
            // Their position is exact for any batch.
            return sentences;
        }
        let batch = self.0.get("--batch").and_then(Value::as_u64);
        let sample = batch.and_then(|batch| step.checked_mul(batch));
        if let Some(sample) = sample.filter(|sample| *sample != saved.data.sample) {
            sentences.push(format!(
                "the run continues with sample {sample} of the data, but step {step} was saved after sample {}",
                saved.data.sample
            ));
        }
        sentences
    }
}

/// Returns the settings of a step. If they name no optimizer, adds the only optimizer of earlier versions.
fn with_former_optimizer(mut was: Map<String, Value>) -> Map<String, Value> {
    let former = [
        (OPTIMIZER, json!(OptimizerName::Adamw)),
        (NO_DECAY, json!([])),
    ];
    for (name, value) in former {
        was.entry(name).or_insert(value);
    }
    was
}

fn of_model(args: &ModelArgs) -> Map<String, Value> {
    let ModelArgs {
        seq,
        seed,
        // The step's model is compared as a whole, and another model is rejected.
        model: _,
        layers: _,
        dim: _,
        heads: _,
        vocab: _,
        // The weights come from the step. With adapters, the checksum of their base and their sizes are compared.
        init: _,
        lora: _,
        // An output.
        save_init: _,
    } = args;
    map(json!({ "--seq": seq, "--seed": seed }))
}

fn of_training(args: &TrainingArgs) -> Map<String, Value> {
    let TrainingArgs {
        batch,
        // The end of a falling schedule depends on the number of steps, see below. Otherwise, a run may be continued for
        // longer.
        steps,
        warmup,
        lr,
        lr_schedule,
        lr_warmup,
        lr_decay,
        // Resolved values, from the recipe.
        optimizer: _,
        accumulate,
        no_sync,
        clip_grad_norm,
        precision,
        reduce_dtype,
        // Only decides whether a run ends, and changes no number before that.
        nan: _,
        // The same operations, run twice.
        activation_checkpointing: _,
        // The same operations, on parts of the rows.
        loss_chunks: _,
        memory_budget: _,
        // Proofs, and the choice of device and engine. Steps work on every device and with both engines, whose numbers
        // only differ by the order of sums.
        certify: _,
        device: _,
        compile: _,
    } = args;
    let mut all = map(json!({
        "--batch": batch,
        "--lr": lr,
        "--lr-schedule": lr_schedule,
        "--lr-warmup": lr_warmup,
        "--accumulate": accumulate,
        "--no-sync": no_sync,
        "--clip-grad-norm": clip_grad_norm,
        "--precision": name_of(*precision),
        REDUCE_DTYPE: name_of(reduce_dtype.unwrap_or(*precision)),
    }));
    if *lr_schedule != LrSchedule::Constant {
        let both = json!(warmup.saturating_add(*steps));
        all.insert(LAST_STEP.to_owned(), both);
    }
    if *lr_schedule == LrSchedule::Wsd {
        all.insert("--lr-decay".to_owned(), json!(lr_decay));
    }
    all
}

/// The settings that determine which ranks sum with each other.
const OF_SUMS: [&str; 3] = ["--ranks", "--strategy", "--replicate-size"];

/// Returns true if gradients are reduced in 16 bits. Each rank then rounds its gradients before it sends them, so
/// numbers depend on [`OF_SUMS`]. In 32 bits, only the order of a sum depends on them.
fn is_rounded(settings: &Map<String, Value>) -> bool {
    let reduced = settings.get(REDUCE_DTYPE);
    reduced.is_some_and(|dtype| *dtype != json!(name_of(Float::F32)))
}

fn of_sums(args: &ShardingArgs, division: Division) -> Map<String, Value> {
    let ShardingArgs {
        // Resolved values, see below.
        ranks: _,
        strategy: _,
        replicate_size: _,
        // These determine when and where work is done, but not its result. Threads only change the order of sums.
        threads: _,
        prefetch: _,
        unit_size: _,
        offload: _,
        check: _,
        deadline: _,
    } = args;
    let values = [
        json!(division.ranks),
        json!(division.strategy),
        json!(division.replicas),
    ];
    let names = OF_SUMS.map(str::to_owned);
    names.into_iter().zip(values).collect()
}

/// Lists the flags that affect neither batches nor numbers of a training run.
fn no_number_depends_on(data: &DataArgs, checkpoint: &CheckpointArgs, output: &OutputArgs) {
    let DataArgs {
        // The text and the tokenizer are compared, and so is the position in documents.
        data: _,
        data_format: _,
        text_field: _,
        prompt_field: _,
        completion_field: _,
        chat_field: _,
        // Resolved, from the documents.
        packing: _,
        tokenizer: _,
        synthetic: _,
        eval_every: _,
        eval_batches: _,
    } = data;
    let CheckpointArgs {
        checkpoint_dir: _,
        save_every: _,
        keep_last: _,
        resume: _,
        overwrite: _,
        save_deadline: _,
    } = checkpoint;
    let OutputArgs {
        metrics: _,
        tensorboard: _,
        trace: _,
        operations: _,
        dump_graphs: _,
        curve: _,
        sample: _,
        utilization: _,
        json: _,
    } = output;
}

fn name_of(float: Float) -> String {
    format!("{float:?}").to_lowercase()
}

fn map(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn older(saved: &TrainingState) -> Map<String, Value> {
    let mut was = Map::new();
    was.insert("--seed".to_owned(), json!(saved.seed));
    if let Some(peak) = saved.learning_rate.get("peak") {
        was.insert("--lr".to_owned(), peak.clone());
    }
    was
}

/// Returns the flag for a setting. Saved steps store two settings under names without dashes.
fn flag_of(name: &str) -> String {
    match name {
        DATA | TOKENIZER => format!("--{name}"),
        LAST_STEP => format!("the schedule's last step ({LAST_STEP})"),
        flag => flag.to_owned(),
    }
}

/// Returns true if two values are the same. Numbers are compared by value, regardless of their notation.
fn is_same(was: &Value, own: &Value) -> bool {
    was == own || was.as_f64().is_some_and(|was| Some(was) == own.as_f64())
}

fn shortened(value: &Value) -> String {
    let text = match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(all) if all.is_empty() => "none".to_owned(),
        Value::Array(all) => {
            let all = all.iter().map(|one| one.as_str().unwrap_or_default());
            all.collect::<Vec<_>>().join(", ")
        }
        value => value.to_string(),
    };
    // The file may come from anyone.
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(100).collect()
}
