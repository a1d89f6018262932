//! The commit, machine and command of a benchmark's numbers, printed above them and recorded with them.

use std::fmt;
use std::process::Command;

/// Everything that is needed to repeat a run.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    name: &'static str,
    commit: String,
    date: String,
    processor: String,
    /// The processor's instruction sets that determine the speed of products.
    instructions: String,
    cores: usize,
    memory_gib: f64,
    flags: String,
}

impl Run {
    /// Describes this process.
    pub(crate) fn here(name: &'static str) -> Self {
        // Cargo adds this flag.
        let flags = std::env::args().skip(1).filter(|flag| flag != "--bench");
        let kibibytes = line_of("/proc/meminfo", "MemTotal:");
        let kibibytes = kibibytes.split_whitespace().next();
        let kibibytes = kibibytes.and_then(|number| number.parse::<f64>().ok());
        // The commit of the sources from which this program was built, wherever it is started.
        let sources = env!("CARGO_MANIFEST_DIR");
        let describe = ["describe", "--always", "--dirty", "--abbrev=12"];
        Self {
            name,
            commit: output_of("git", &[&["-C", sources], &describe[..]].concat()),
            date: output_of("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
            processor: line_of("/proc/cpuinfo", "model name"),
            instructions: instructions().join(" "),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: kibibytes.unwrap_or(0.0) / f64::from(1 << 20),
            flags: flags.collect::<Vec<_>>().join(" "),
        }
    }

    /// Returns the same for the file of raw results.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "benchmark": self.name,
            "commit": self.commit,
            "date": self.date,
            "processor": self.processor,
            "instructions": self.instructions,
            "cores": self.cores,
            "memory_gib": (10.0 * self.memory_gib).round() / 10.0,
            "flags": self.flags,
        })
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}, commit {}, {} ({}), {} cores, {:.1} GiB, flags: {}",
            self.name,
            self.date,
            self.commit,
            self.processor,
            self.instructions,
            self.cores,
            self.memory_gib,
            if self.flags.is_empty() {
                "none"
            } else {
                &self.flags
            }
        )
    }
}

/// Returns the processor's vector instruction sets that products use.
fn instructions() -> Vec<&'static str> {
    let flags = line_of("/proc/cpuinfo", "flags");
    let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
    let of_products = ["avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"];
    of_products.into_iter().filter(|name| has(name)).collect()
}

/// Returns the output of a program, or `unknown` if it cannot be run.
fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.ok().filter(|output| output.status.success());
    let text = text.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the text after a name in a system file, or `unknown` if it is missing.
fn line_of(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.map(|value| value.trim_start_matches([' ', '\t', ':']).to_owned());
    value.unwrap_or_else(|| "unknown".to_owned())
}
