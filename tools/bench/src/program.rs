//! One run of a program, and the numbers that it reports.

use std::path::Path;
use std::process::Command;

use serde::Serialize;
use serde_json::Value;

use crate::error::Error;

/// The results of one training run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measurement {
    pub(crate) tokens_per_s: f64,
    /// Peak resident bytes of a rank, minus its resident bytes at the start.
    pub(crate) peak_bytes: Option<f64>,
    pub(crate) losses: Vec<f64>,
}

/// Runs a program and returns the last JSON object that it prints.
pub(crate) fn json_of(program: &Path, words: &[String]) -> Result<Value, Error> {
    let cannot = |problem: String| Error::CannotRun {
        program: format!("{} {}", program.display(), words.join(" ")),
        problem,
    };
    let output = Command::new(program).args(words).output();
    let output = output.map_err(|error| cannot(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let lines: Vec<&str> = said.trim().lines().collect();
        let end = lines[lines.len().saturating_sub(12)..].join("\n");
        return Err(cannot(format!("it ended with {}: {end}", output.status)));
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let mut lines = printed.lines().rev();
    let object = lines.find_map(|line| serde_json::from_str::<Value>(line).ok());
    object.ok_or_else(|| cannot("it printed no JSON object".to_owned()))
}

impl Measurement {
    /// Reads the output of `burn-fsdp` or of a program of the peer.
    pub(crate) fn read(from: &Value, ranks: usize) -> Result<Self, Error> {
        let tokens_per_s = from["tokens_per_s"].as_f64();
        let numbers = |field: &Value| -> Vec<f64> {
            let all = field.as_array().into_iter().flatten();
            all.filter_map(Value::as_f64).collect()
        };
        let of_process = || {
            let peak = numbers(&from["peak_rss_bytes"]).into_iter().next()?;
            // Ranks that are threads share a process.
            Some((peak - from["start_rss_bytes"].as_f64()?) / ranks as f64)
        };
        let of_ranks = numbers(&from["peak_delta_mib"]).into_iter();
        let of_ranks = of_ranks.map(|mib| mib * f64::from(1 << 20));
        Ok(Self {
            tokens_per_s: tokens_per_s.ok_or_else(|| Error::CannotRun {
                program: "a training".to_owned(),
                problem: format!("it reported no tokens per second: {from}"),
            })?,
            peak_bytes: of_ranks.reduce(f64::max).or_else(of_process),
            losses: numbers(&from["losses"]),
        })
    }
}
