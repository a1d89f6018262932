//! The settings that the numbers of a run depend on, beside its model: saved with each step, and
//! compared when a run goes on from it.

use burn_fsdp::checkpoint::TrainingState;
use serde_json::{Map, Value, json};

use crate::args::{LrSchedule, TrainArgs};
use crate::train::data::Data;

/// Name of the section of a saved step.
const SECTION: &str = "settings";

/// Name of the setting that has the tokenizer, `null` for bytes.
const TOKENIZER: &str = "tokenizer";

/// Returns the tokenizer of the text that a step was trained on; `None` for bytes, and where a step does not say.
pub(crate) fn tokenizer_of(saved: &TrainingState) -> Option<&str> {
    saved.sections.get(SECTION)?.get(TOKENIZER)?.as_str()
}

/// The settings by flag, as given or by default.
#[derive(Debug, Clone)]
pub(crate) struct Settings(Map<String, Value>);

impl Settings {
    pub(crate) fn new(args: &TrainArgs, data: &Data) -> Self {
        let training = &args.training;
        let float = |float| format!("{float:?}").to_lowercase();
        // As it was typed, and not the nearest of 32 bits written with 64.
        let decimal = |value: f32| value.to_string().parse().unwrap_or(f64::from(value));
        let precision = training.precision;
        let mut all = json!({
            "--seed": args.model.seed,
            "data": data.identity(),
            TOKENIZER: data.tokenizer(),
            "--batch": training.batch,
            "--lr": training.lr,
            "--lr-schedule": training.lr_schedule,
            "--lr-warmup": training.lr_warmup,
            "--beta1": decimal(training.beta1),
            "--beta2": decimal(training.beta2),
            "--eps": decimal(training.eps),
            "--weight-decay": decimal(training.weight_decay),
            "--clip-grad-norm": training.clip_grad_norm,
            "--precision": float(precision),
            "--reduce-dtype": float(training.reduce_dtype.unwrap_or(precision)),
        });
        if training.lr_schedule == LrSchedule::Cosine {
            // Where the learning rate falls to depends on how many there are.
            all["--warmup and --steps"] = json!(training.warmup.saturating_add(training.steps));
        }
        match all {
            Value::Object(all) => Self(all),
            _ => Self(Map::new()),
        }
    }

    /// Adds the settings to the state that is saved.
    pub(crate) fn save_into(&self, training: &mut TrainingState) {
        let settings = Value::Object(self.0.clone());
        training.sections.insert(SECTION.to_owned(), settings);
    }

    /// Returns one sentence for each setting that is not as it was when a step was saved.
    pub(crate) fn differences(&self, saved: &TrainingState) -> Vec<String> {
        let step = saved.step;
        let was = match saved.sections.get(SECTION) {
            Some(Value::Object(was)) => was.clone(),
            // A step from before there was such a section, or of another program.
            _ => older(saved),
        };
        let own = self.0.iter();
        let changed = own.filter_map(|(name, own)| {
            let was = was.get(name)?;
            (!is_same(was, own)).then_some((name, was, own))
        });
        let mut sentences: Vec<_> = changed
            .map(|(name, was, own)| {
                let own = shortened(own);
                let was = shortened(was);
                format!("{name} is {own}, but was {was} when step {step} was saved")
            })
            .collect();
        let batch = self.0.get("--batch").and_then(Value::as_u64);
        let sample = batch.and_then(|batch| step.checked_mul(batch));
        if let Some(sample) = sample.filter(|sample| *sample != saved.data.sample) {
            sentences.push(format!(
                "the run goes on with sample {sample} of the data, but step {step} was saved after \
                 sample {}",
                saved.data.sample
            ));
        }
        sentences
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

/// Returns true if two values are the same; numbers by value, however they are written.
fn is_same(was: &Value, own: &Value) -> bool {
    was == own || was.as_f64().is_some_and(|was| Some(was) == own.as_f64())
}

fn shortened(value: &Value) -> String {
    let text = match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    // The file may be from anyone.
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(100).collect()
}
