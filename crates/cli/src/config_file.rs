//! The flags of `train` in a TOML file.
//!
//! The flags of the file are inserted into the command line before it is parsed, so every check of a flag holds for
//! both. A flag on the command line replaces the one in the file.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory};
use toml::{Table, Value};

use crate::args::Cli;
use crate::error::InputError;

/// Maximum size of a file in bytes, because a device such as `/dev/zero` has no end.
const LONGEST: u64 = 1 << 20;

/// The command whose flags a file may contain.
const TRAIN: &str = "train";

/// The flags about the file itself, which it cannot contain.
const OWN: [&str; 2] = ["config", "print-config"];

/// Inserts the flags of `--config FILE` into the command line of a `train`. Returns any other command line unchanged.
///
/// # Errors
///
/// [`InputError::Config`] if the file cannot be read, is not TOML, or has a key or value that `train` does not accept.
pub(crate) fn with_flags_of_file(line: Vec<OsString>) -> Result<Vec<OsString>, InputError> {
    if line.get(1).map(OsString::as_os_str) != Some(OsStr::new(TRAIN)) {
        return Ok(line);
    }
    // A line with errors, or one that asks for help, is left to the parser.
    let given = Cli::command()
        .ignore_errors(true)
        .try_get_matches_from(&line);
    let Ok(given) = given else { return Ok(line) };
    let Some(given) = given.subcommand_matches(TRAIN) else {
        return Ok(line);
    };
    let Some(path) = given.get_one::<PathBuf>("config") else {
        return Ok(line);
    };
    let flags = File::read(path)?.flags(given)?;
    let (program, own) = line.split_at(2);
    Ok([program, &flags, own].concat())
}

/// Returns true if `train` with these arguments, or the file that they name, resumes a run.
pub(crate) fn resumes(words: &[String]) -> bool {
    let is_resume = |word: &OsString| {
        let word = word.to_string_lossy();
        word == "--resume" || word.starts_with("--resume=")
    };
    let line = ["burn-fsdp", TRAIN].into_iter().map(OsString::from);
    let line: Vec<_> = line.chain(words.iter().map(OsString::from)).collect();
    // `train` itself reports a faulty file.
    with_flags_of_file(line.clone())
        .unwrap_or(line)
        .iter()
        .any(is_resume)
}

/// A configuration file.
struct File<'a> {
    path: &'a Path,
    table: Table,
    train: Command,
}

fn failed(path: &Path, problem: String) -> InputError {
    InputError::Config {
        path: path.to_owned(),
        problem,
    }
}

impl<'a> File<'a> {
    fn read(path: &'a Path) -> Result<Self, InputError> {
        let failed = |problem| failed(path, problem);
        let mut text = String::new();
        let file = std::fs::File::open(path);
        let read = file.and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text));
        let bytes = read.map_err(|error| failed(error.to_string()))?;
        if bytes as u64 > LONGEST {
            return Err(failed(format!("it has more than {LONGEST} bytes")));
        }
        let table = text.parse().map_err(|error: toml::de::Error| {
            let line = error
                .span()
                .map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            failed(format!("line {line}: {}", error.message()))
        })?;
        Ok(Self {
            path,
            table,
            train: train(),
        })
    }

    /// Returns the flags of the file, without those on the command line.
    fn flags(&self, given: &ArgMatches) -> Result<Vec<OsString>, InputError> {
        let mut all = Vec::new();
        let mut missing = Vec::new();
        for (key, value) in &self.table {
            let arg = self.arg(key)?;
            let words = words_of(arg, key, value).map_err(|problem| self.failed(problem))?;
            let is_given =
                given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
            if !is_given {
                missing.extend(words.iter().cloned());
            }
            all.extend(words);
        }
        self.check(all)?;
        Ok(missing)
    }

    fn arg(&self, key: &str) -> Result<&Arg, InputError> {
        let dashed = key.replace('_', "-");
        let problem = match (self.find(key), self.find(&dashed)) {
            (Some(arg), _) if is_setting(arg) => return Ok(arg),
            (Some(_), _) => format!("--{key} cannot be in a file; pass it on the command line"),
            (None, Some(_)) => format!("unknown key `{key}`; write `{dashed}`"),
            (None, None) => format!(
                "unknown key `{key}`; keys are the long flags of `burn-fsdp train --help` without dashes"
            ),
        };
        Err(self.failed(problem))
    }

    fn find(&self, long: &str) -> Option<&Arg> {
        let mut all = self.train.get_arguments();
        all.find(|arg| arg.get_long() == Some(long))
    }

    /// Checks each value. Flags that need or exclude others are checked with the whole command line.
    fn check(&self, words: Vec<OsString>) -> Result<(), InputError> {
        let line = [OsString::from(TRAIN)].into_iter().chain(words);
        let result = self.train.clone().try_get_matches_from(line);
        match result {
            Ok(_) => Ok(()),
            Err(error) if is_about_several(error.kind()) => Ok(()),
            Err(error) => {
                let text = error.render().to_string();
                let problem = text.split("\n\n").next().unwrap_or(&text);
                let problem = problem.trim().trim_start_matches("error: ");
                Err(self.failed(problem.to_owned()))
            }
        }
    }

    fn failed(&self, problem: String) -> InputError {
        failed(self.path, problem)
    }
}

/// Returns the definition of `train`, with its flags.
fn train() -> Command {
    let mut all = Cli::command();
    all.build();
    all.find_subcommand(TRAIN).cloned().unwrap_or_default()
}

/// Returns true if a file may contain the flag.
fn is_setting(arg: &Arg) -> bool {
    let is_action = matches!(
        arg.get_action(),
        ArgAction::Set | ArgAction::Append | ArgAction::SetTrue
    );
    is_action && arg.get_long().is_some_and(|long| !OWN.contains(&long))
}

fn is_about_several(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict
    )
}

/// Returns a key and its value as words of a command line, or the problem with them.
fn words_of(arg: &Arg, key: &str, value: &Value) -> Result<Vec<OsString>, String> {
    let takes_nothing = matches!(arg.get_action(), ArgAction::SetTrue);
    let may_take_nothing = arg
        .get_num_args()
        .is_some_and(|range| range.min_values() == 0);
    let with = |value: String| Ok(OsString::from(format!("--{key}={value}")));
    match value {
        Value::Boolean(is_on) if takes_nothing || may_take_nothing => Ok(if *is_on {
            vec![format!("--{key}").into()]
        } else {
            Vec::new()
        }),
        Value::Boolean(_) => Err(format!("`{key}` takes a value, not true or false")),
        _ if takes_nothing => Err(format!("`{key}` is true or false, not {value}")),
        Value::Array(values) if matches!(arg.get_action(), ArgAction::Append) => values
            .iter()
            .map(|value| single(key, value).and_then(with))
            .collect(),
        value => Ok(vec![single(key, value).and_then(with)?]),
    }
}

/// Returns a value as it is written on a command line.
fn single(key: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Table(_) => Err(format!(
            "`{key}` is a table; write the flags in it at the top of the file"
        )),
        Value::Array(_) => Err(format!("`{key}` takes one value, not a list")),
        Value::Boolean(_) | Value::Datetime(_) => Err(format!(
            "`{key}` cannot be {value}; write a string or a number"
        )),
    }
}

/// Returns all flags of a parsed `train` as a file for `--config`. Defaults are comments.
pub(crate) fn as_file(matches: &ArgMatches) -> String {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for arg in train().get_arguments().filter(|arg| is_setting(arg)) {
        let heading = arg.get_help_heading().unwrap_or("Other").to_owned();
        if let Some(line) = line_of(arg, matches) {
            groups.entry(heading).or_default().push(line);
        }
    }
    let groups = groups
        .into_iter()
        .map(|(heading, lines)| format!("# {heading}\n{}\n", lines.join("\n")));
    groups.collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// Returns the line of a flag. Returns `None` for a flag that is off, or has neither a value nor a default.
fn line_of(arg: &Arg, matches: &ArgMatches) -> Option<String> {
    let (id, key) = (arg.get_id().as_str(), arg.get_long()?);
    let is_default = matches.value_source(id)? == ValueSource::DefaultValue;
    let values: Vec<Value> = matches.get_raw(id)?.map(|raw| value_of(arg, raw)).collect();
    let value = match values.as_slice() {
        [Value::Boolean(false)] => return None,
        [value] if !matches!(arg.get_action(), ArgAction::Append) => value.to_string(),
        _ => Value::Array(values).to_string(),
    };
    let comment = if is_default { "# " } else { "" };
    Some(format!("{comment}{key} = {value}"))
}

/// Returns a word of a command line as a value of TOML.
fn value_of(arg: &Arg, raw: &OsStr) -> Value {
    let text = raw.to_string_lossy();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return Value::Boolean(text == "true");
    }
    // A number that TOML prints differently stays a string, which the flag reads as it was written.
    let number = text
        .parse()
        .map(Value::Integer)
        .or_else(|_| text.parse().map(Value::Float));
    match number {
        Ok(number) if number.to_string() == text => number,
        _ => Value::String(text.into_owned()),
    }
}
