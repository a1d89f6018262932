//! The rotary positions in a `config.json` in Hugging Face's format.

use serde_json::{Value, json};

use crate::family::Family;
use crate::rope_scaling::{RopeFactors, RopeScaling};
use crate::settings::{Settings, contradiction, is_same, refusal};

/// The names of the scaling setting, up to transformers 4 and from version 5.
const ROPE: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// The names of the kind of scaling. Transformers writes both if it read a file with the older one.
const ROPE_TYPE: [&str; 2] = ["rope_type", "type"];

/// The settings of a nested object that are read here, and one that only records how a model was trained.
const READ: [&str; 19] = [
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "rotary_emb_base",
    "rotary_pct",
    "short_factor",
    "truncate",
    "type",
];

/// The names of Gemma 3's objects for each kind of layer.
const LAYERS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The setting of the original context length.
const ORIGINAL: &str = "original_max_position_embeddings";

/// The settings of the rotary positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rope {
    pub(crate) theta: usize,
    pub(crate) scaling: RopeScaling,
    /// The rotated share of each head.
    pub(crate) share: f64,
    /// The base in layers with a sliding window, if it is a separate setting.
    pub(crate) local_theta: Option<usize>,
}

/// The properties of a model that the settings of its rotary positions depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeContext {
    pub(crate) family: Family,
    /// The maximum sequence length.
    pub(crate) longest: usize,
}

impl Rope {
    /// Reads the settings of a model.
    pub(crate) fn of(settings: Settings<'_>, context: RopeContext) -> Result<Self, String> {
        if context.family == Family::Gemma3 {
            return Self::of_gemma3(settings, context);
        }
        let [older, newer] = ROPE;
        let read = |name| -> Result<Option<Self>, String> {
            let nested = settings.nested(name)?;
            nested
                .map(|nested| Self::of_nested(settings, nested, context))
                .transpose()
        };
        match (read(older)?, read(newer)?) {
            (Some(one), Some(other)) if one != other => Err(format!(
                "`{older}` and `{newer}` differ, but both set the rotary positions, and versions of transformers \
                 disagree on which one applies; remove the wrong one"
            )),
            (Some(rope), _) | (None, Some(rope)) => Ok(rope),
            (None, None) => Ok(Self {
                theta: theta(settings, Settings::empty(), context.family)?,
                scaling: RopeScaling::None,
                share: share(settings, Settings::empty(), context.family)?,
                local_theta: None,
            }),
        }
    }

    /// Reads the settings from a nested object. Some settings that it lacks are taken from the outer object.
    fn of_nested(
        settings: Settings<'_>,
        nested: Settings<'_>,
        context: RopeContext,
    ) -> Result<Self, String> {
        if nested.has_objects() {
            return Err(format!(
                "`{}` or `{}` has an object for each kind of layer, but a {} has only one kind",
                ROPE[0],
                ROPE[1],
                context.family.name()
            ));
        }
        check_known(nested, context.family)?;
        Ok(Self {
            theta: theta(settings, nested, context.family)?,
            scaling: scaling(settings, nested, context)?,
            share: share(settings, nested, context.family)?,
            local_theta: None,
        })
    }

    /// Reads the settings of a Gemma 3: the newer ones have an object for each kind of layer, and the older ones set
    /// only the scaling of layers that see all tokens.
    fn of_gemma3(settings: Settings<'_>, context: RopeContext) -> Result<Self, String> {
        let family = context.family;
        let [older, newer] = ROPE;
        let older_scaling = settings.nested(older)?;
        let newer_scaling = settings.nested(newer)?;
        if let (Some(_), Some(_)) = (older_scaling, newer_scaling) {
            return Err(format!(
                "`{older}` and `{newer}` both set the rotary positions; remove the older one"
            ));
        }
        let by_layer = newer_scaling.unwrap_or_else(Settings::empty);
        let is_layer = |(name, value): &(&str, &Value)| LAYERS.contains(name) || value.is_null();
        if let Some((name, _)) = by_layer.all().find(|setting| !is_layer(setting)) {
            let found = by_layer.shown(name);
            let expected = "an object for each kind of layer in `rope_parameters`";
            return Err(refusal(family.name(), (name, &found), expected));
        }
        let full = match older_scaling {
            Some(older) => Some(older),
            None => by_layer.nested(LAYERS[0])?,
        };
        let full = full.unwrap_or_else(Settings::empty);
        let sliding = by_layer.nested(LAYERS[1])?.unwrap_or_else(Settings::empty);
        check_known(full, family)?;
        check_known(sliding, family)?;
        let kind = sliding.word(&ROPE_TYPE, "default")?;
        if kind != "default" {
            let found = format!("{kind:?} in `sliding_attention`");
            let expected = "\"default\" there";
            return Err(refusal(family.name(), (ROPE_TYPE[0], &found), expected));
        }
        let local = match (
            settings.optional_number("rope_local_base_freq")?,
            sliding.optional_number("rope_theta")?,
        ) {
            (Some(outer), Some(inner)) if outer != inner => {
                let (outer, inner) = (json!(outer), json!(inner));
                let inner_name = "rope_theta of `sliding_attention`";
                return Err(contradiction(
                    ("rope_local_base_freq", &outer),
                    (inner_name, &inner),
                ));
            }
            (Some(local), _) | (None, Some(local)) => local,
            (None, None) => 10_000.0,
        };
        share(settings, full, family)?;
        refuse_ignored_by_gemma3(settings, older_scaling, full)?;
        Ok(Self {
            theta: theta(settings, full, family)?,
            scaling: scaling(settings, full, context)?,
            share: 1.0,
            local_theta: Some(whole(family, ("rope_local_base_freq", local))?),
        })
    }
}

/// Refuses settings of a Gemma 3 that transformers reads only for other families.
fn refuse_ignored_by_gemma3(
    settings: Settings<'_>,
    older: Option<Settings<'_>>,
    full: Settings<'_>,
) -> Result<(), String> {
    let refused = |name: &str, found: &str, expected: &str| -> Result<(), String> {
        Err(refusal(Family::Gemma3.name(), (name, found), expected))
    };
    let kind = full.word(&ROPE_TYPE, "default")?;
    let [newer_name, older_name] = ROPE_TYPE;
    // Transformers merges this object into one whose `rope_type` is "default".
    if older.is_some_and(|older| older.given(newer_name).is_none()) && kind != "default" {
        let expected = "the name `rope_type` for it";
        return refused(older_name, &full.shown(older_name), expected);
    }
    if !full.flag("truncate", true)? {
        return refused("truncate", "false", "true");
    }
    let has_original = matches!(kind, "llama3" | "longrope" | "yarn");
    if has_original && full.given(ORIGINAL).is_none() && settings.given(ORIGINAL).is_some() {
        let expected = "this setting within the rotary positions";
        return refused(ORIGINAL, &settings.shown(ORIGINAL), expected);
    }
    Ok(())
}

fn check_known(nested: Settings<'_>, family: Family) -> Result<(), String> {
    let is_known = |(name, value): &(&str, &Value)| READ.contains(name) || value.is_null();
    match nested.all().find(|setting| !is_known(setting)) {
        None => Ok(()),
        Some((name, _)) => Err(format!(
            "`{name}` of the rotary positions is {}, a setting that this {} does not know and that may change what it \
             computes; remove it if it has no effect, or write the model as your own Burn module",
            nested.shown(name),
            family.name()
        )),
    }
}

/// Reads the kind of scaling and its numbers.
fn scaling(
    settings: Settings<'_>,
    nested: Settings<'_>,
    context: RopeContext,
) -> Result<RopeScaling, String> {
    let RopeContext { family, longest } = context;
    let missing = |name| format!("`{name}` of the rotary positions is missing");
    let factor = |name| nested.number(name)?.ok_or_else(|| missing(name));
    let original = || original(settings, nested, context);
    let kind = match (nested.word(&ROPE_TYPE, "default")?, family) {
        // Older names in Phi-3's own code.
        ("su" | "yarn", Family::Phi3) => "longrope",
        (kind, _) => kind,
    };
    Ok(match kind {
        "linear" | "dynamic" | "llama3" | "yarn" if family == Family::Phi3 => {
            return Err(unknown_kind(family, kind, "\"default\" or \"longrope\""));
        }
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: factor("factor")?,
        },
        "dynamic" => RopeScaling::Dynamic {
            factor: factor("factor")?,
        },
        "llama3" => RopeScaling::Llama3 {
            factor: factor("factor")?,
            low_freq_factor: factor("low_freq_factor")?,
            high_freq_factor: factor("high_freq_factor")?,
            original_max_position_embeddings: original()?,
        },
        "yarn" => yarn(nested, longest, original()?)?,
        "longrope" => longrope(nested, longest, original()?)?,
        _ => {
            let known =
                "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" or \"longrope\"";
            return Err(unknown_kind(family, kind, known));
        }
    })
}

fn unknown_kind(family: Family, kind: &str, known: &str) -> String {
    refusal(family.name(), (ROPE_TYPE[0], &format!("{kind:?}")), known)
}

fn yarn(nested: Settings<'_>, longest: usize, original: usize) -> Result<RopeScaling, String> {
    let implied = longest as f64 / original as f64;
    let factor = nested.optional_number("factor")?.unwrap_or(implied);
    // Zero counts as absent in transformers.
    let number = |name| -> Result<Option<f64>, String> {
        Ok(nested
            .optional_number(name)?
            .filter(|number| *number != 0.0))
    };
    let scale = |times: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * times * factor.ln() + 1.0
        }
    };
    let attention_factor = match (
        nested.optional_number("attention_factor")?,
        number("mscale")?,
        number("mscale_all_dim")?,
    ) {
        (Some(given), ..) => given,
        (None, Some(some), Some(all)) => scale(some) / scale(all),
        (None, ..) => scale(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor,
        beta_fast: number("beta_fast")?.unwrap_or(32.0),
        beta_slow: number("beta_slow")?.unwrap_or(1.0),
        truncate: nested.flag("truncate", true)?,
        original_max_position_embeddings: original,
    })
}

fn longrope(nested: Settings<'_>, longest: usize, original: usize) -> Result<RopeScaling, String> {
    let implied = longest as f64 / original as f64;
    let factor = nested.optional_number("factor")?.unwrap_or(implied);
    let recommended = if factor <= 1.0 {
        1.0
    } else {
        (1.0 + factor.ln() / (original as f64).ln()).sqrt()
    };
    let given = nested.optional_number("attention_factor")?;
    Ok(RopeScaling::LongRope {
        short_factor: RopeFactors::new(&nested.numbers("short_factor")?),
        long_factor: RopeFactors::new(&nested.numbers("long_factor")?),
        attention_factor: given.unwrap_or(recommended),
        original_max_position_embeddings: original,
    })
}

/// Reads the original context length. Phi-3 has its own default in the outer object.
fn original(
    settings: Settings<'_>,
    nested: Settings<'_>,
    context: RopeContext,
) -> Result<usize, String> {
    const OF_PHI3: usize = 4096;
    let given = inner_or_outer(settings, nested, &[ORIGINAL])?;
    let size = given.optional_size(ORIGINAL)?;
    let is_outer = settings.given(ORIGINAL).is_some();
    match (context.family, size) {
        (Family::Phi3, Some(inner)) if !is_outer && inner != OF_PHI3 => {
            let (inner, outer) = (json!(inner), json!(OF_PHI3));
            let inner_name = format!("{ORIGINAL} of the rotary positions");
            let problem = contradiction((ORIGINAL, &outer), (&inner_name, &inner));
            Err(format!(
                "{problem}, or set both: the outer one is absent, so it has its default"
            ))
        }
        (Family::Phi3, size) => Ok(size.unwrap_or(OF_PHI3)),
        (_, size) => Ok(size.unwrap_or(context.longest)),
    }
}

/// Reads the base of the rotary positions.
fn theta(settings: Settings<'_>, nested: Settings<'_>, family: Family) -> Result<usize, String> {
    let (names, default): (&[&str], _) = match family {
        Family::GptNeox => (&["rotary_emb_base", "rope_theta"], 10_000.0),
        Family::Gemma3 => (&["rope_theta"], 1_000_000.0),
        _ => (&["rope_theta"], 10_000.0),
    };
    let theta = inner_or_outer(settings, nested, names)?.number_of(names)?;
    let theta = theta.unwrap_or(default);
    if family == Family::GptNeox {
        let names = ["rope_theta", "rotary_emb_base"];
        check_used_by_neox(settings, nested, names, [theta, default])?;
    }
    whole(family, ("rope_theta", theta))
}

/// Checks that transformers uses this number for a GPT-NeoX: it reads `inner` in the nested object, or else `outer`.
fn check_used_by_neox(
    settings: Settings<'_>,
    nested: Settings<'_>,
    [inner, outer]: [&'static str; 2],
    [number, default]: [f64; 2],
) -> Result<(), String> {
    let used = nested.given(inner).or_else(|| settings.given(outer));
    let used = used.and_then(Value::as_f64).unwrap_or(default);
    if number == used {
        Ok(())
    } else {
        Err(format!(
            "the rotary positions set {number}, but transformers uses {used} here: for a {}, it reads `{inner}` in \
             `{}`, or `{outer}` outside of it; use one of these names",
            Family::GptNeox.name(),
            ROPE[1]
        ))
    }
}

fn whole(family: Family, (name, number): (&str, f64)) -> Result<usize, String> {
    if number.fract() == 0.0 && (1.0..1e15).contains(&number) {
        return Ok(number as usize);
    }
    let given = (name, &*number.to_string());
    Err(refusal(family.name(), given, "a whole number of 1 or more"))
}

/// Reads the rotated share of each head.
fn share(settings: Settings<'_>, nested: Settings<'_>, family: Family) -> Result<f64, String> {
    let name = "partial_rotary_factor";
    let (names, default): (&[&str], _) = match family {
        Family::GptNeox => (&["rotary_pct", name], 0.25),
        _ => (&[name], 1.0),
    };
    let given = inner_or_outer(settings, nested, names)?;
    let is_given = names.iter().any(|name| given.given(name).is_some());
    let share = if is_given {
        given.number_of(names)?.unwrap_or(default)
    } else {
        default
    };
    if family == Family::GptNeox {
        check_used_by_neox(settings, nested, [name, "rotary_pct"], [share, default])?;
    }
    let is_known = if family.may_rotate_partly() {
        share > 0.0 && share <= 1.0
    } else {
        share == 1.0
    };
    match (is_known, family.may_rotate_partly()) {
        (true, _) => Ok(share),
        (false, true) => {
            let expected = "a number above 0 and at most 1";
            Err(refusal(family.name(), (name, &share.to_string()), expected))
        }
        (false, false) => Err(refusal(family.name(), (name, &share.to_string()), "1")),
    }
}

/// Returns the settings that have one of the names: the nested ones if they have it, or otherwise the outer ones.
fn inner_or_outer<'a>(
    settings: Settings<'a>,
    nested: Settings<'a>,
    names: &[&'a str],
) -> Result<Settings<'a>, String> {
    let of = |settings: Settings<'a>| {
        let mut given = names
            .iter()
            .filter_map(|&name| Some((name, settings.given(name)?)));
        given.next()
    };
    match (of(nested), of(settings)) {
        (Some((name, inner)), Some((outer_name, outer))) if !is_same(inner, outer) => {
            let inner_name = format!("{name} of the rotary positions");
            Err(contradiction((outer_name, outer), (&inner_name, inner)))
        }
        (Some(_), _) => Ok(nested),
        (None, _) => Ok(settings),
    }
}

/// Returns the original context length of a scaling that has one.
pub(crate) fn original_of(scaling: RopeScaling) -> Option<usize> {
    match scaling {
        RopeScaling::Llama3 {
            original_max_position_embeddings,
            ..
        }
        | RopeScaling::Yarn {
            original_max_position_embeddings,
            ..
        }
        | RopeScaling::LongRope {
            original_max_position_embeddings,
            ..
        } => Some(original_max_position_embeddings),
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } => None,
    }
}

/// Returns a scaling as the value of `rope_scaling`.
pub(crate) fn to_json(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
        RopeScaling::Yarn {
            factor,
            attention_factor,
            beta_fast,
            beta_slow,
            truncate,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention_factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "truncate": truncate,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
        RopeScaling::LongRope {
            short_factor,
            long_factor,
            attention_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "longrope",
            "short_factor": short_factor,
            "long_factor": long_factor,
            "attention_factor": attention_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
    }
}
