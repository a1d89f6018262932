//! The runs of a case, alternating between the two sides.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use burn_fsdp::{LaunchConfig, launch};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::case::{Case, PeerCommand, Steps};
use crate::error::Error;
use crate::limits::Limits;
use crate::peers::Peers;
use crate::program::{Measurement, json_of};

/// Number of pairs after which the limits are measured again, so limits and runs are from the same minutes. It is odd,
/// so the limits precede runs of both sides equally often.
const PAIRS_A_LIMIT: usize = 5;

const TEMPLATE: &str = "{bar:32} {pos}/{len} {msg}, {eta} left";

/// One run of each side, in direct succession.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Pair {
    pub(crate) ours: Measurement,
    /// `None` if only our side is measured.
    pub(crate) peer: Option<Measurement>,
}

/// All measurements of a case.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CaseResult {
    pub(crate) case: Case,
    /// The additional arguments of the peer's fastest variant, if it has variants.
    pub(crate) peer_form: Option<String>,
    pub(crate) pairs: Vec<Pair>,
    /// Limits measured between the pairs. For products, the limit is the higher one of Burn's and the peer's.
    pub(crate) limits: Vec<Limits>,
}

/// A function that receives all measurements so far, after every pair.
type Keep<'a> = &'a dyn Fn(&[CaseResult]) -> Result<(), Error>;

/// Measures cases, one after the other.
pub(crate) fn measure(
    args: &BenchArgs,
    command: PathBuf,
    peers: Option<&Peers>,
    cases: &[Case],
    keep: Keep<'_>,
) -> Result<Vec<CaseResult>, Error> {
    let scratch = tempfile::tempdir().map_err(|error| Error::CannotRun {
        program: "the benchmark".to_owned(),
        problem: format!("cannot create a temporary folder: {error}"),
    })?;
    let own = std::env::current_exe().map_err(|error| Error::CannotRun {
        program: "this program".to_owned(),
        problem: error.to_string(),
    })?;
    let target = if args.json {
        ProgressDrawTarget::hidden()
    } else {
        // Hidden automatically if stderr is not a terminal.
        ProgressDrawTarget::stderr()
    };
    let bar = ProgressBar::with_draw_target(Some((cases.len() * args.pairs) as u64), target);
    let style = ProgressStyle::with_template(TEMPLATE);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let bench = Bench {
        command,
        own,
        peers,
        pairs: args.pairs,
        steps: Steps {
            measured: args.steps,
            warmup: args.warmup,
        },
        scratch: scratch.path(),
        bar: &bar,
    };
    let mut results = Vec::new();
    let measured = cases
        .iter()
        .try_for_each(|case| bench.measure(*case, &mut results, keep));
    bar.finish_and_clear();
    measured.map(|()| results)
}

struct Bench<'a> {
    /// The `burn-fsdp` program; `own` is this program.
    command: PathBuf,
    own: PathBuf,
    peers: Option<&'a Peers>,
    pairs: usize,
    steps: Steps,
    scratch: &'a Path,
    bar: &'a ProgressBar,
}

impl Bench<'_> {
    /// Measures a case and adds it to the results so far.
    fn measure(
        &self,
        case: Case,
        results: &mut Vec<CaseResult>,
        keep: Keep<'_>,
    ) -> Result<(), Error> {
        self.bar.set_message(case.name());
        let weights = self.weights(case)?;
        let ours = case.ours(self.steps, weights.as_deref(), self.scratch);
        let program = if case.is_encoder() {
            &self.own
        } else {
            &self.command
        };
        let ours = || Measurement::read(&json_of(program, &ours)?, case.ranks());
        let peer = case.peer(self.steps, weights.as_deref());
        let form = match self.peers {
            Some(peers) => self.fastest_form(peers, case, &peer)?,
            None => &[],
        };
        let theirs = || match self.peers {
            Some(peers) => run_peer(peers, case, &peer, form).map(Some),
            None => Ok(None),
        };
        let own = results.len();
        results.push(CaseResult {
            case,
            peer_form: self.peers.map(|_| form.join(" ")),
            pairs: Vec::with_capacity(self.pairs),
            limits: Vec::new(),
        });
        for number in 0..self.pairs {
            if number % PAIRS_A_LIMIT == 0 {
                results[own].limits.push(self.limits()?);
            }
            // The machine affects the second run of a pair, so each side is second equally often.
            let pair = match number % 2 {
                0 => {
                    let ours = ours()?;
                    Pair {
                        ours,
                        peer: theirs()?,
                    }
                }
                _ => {
                    let peer = theirs()?;
                    Pair {
                        ours: ours()?,
                        peer,
                    }
                }
            };
            let last = match &pair.peer {
                Some(peer) => format!("{:.2}", pair.ours.tokens_per_s / peer.tokens_per_s),
                None => format!("{:.0} tokens/s", pair.ours.tokens_per_s),
            };
            self.bar.set_message(format!("{}: {last}", case.name()));
            self.bar.inc(1);
            results[own].pairs.push(pair);
            keep(results)?;
        }
        results[own].limits.push(self.limits()?);
        keep(results)
    }

    /// Writes the initial weights of both sides, if both can read them.
    fn weights(&self, case: Case) -> Result<Option<PathBuf>, Error> {
        let (Some(peers), Some(shape)) = (self.peers, case.shape()) else {
            return Ok(None);
        };
        let path = self.scratch.join(format!("{}.safetensors", case.name()));
        let text = path.to_string_lossy();
        let rest = ["--steps", "0", "--warmup", "0", "--save-init", &text];
        let mut words = vec!["--mode".to_owned(), "single".to_owned()];
        words.extend(shape);
        words.extend(rest.map(str::to_owned));
        let command = PeerCommand {
            script: "train_peer.py",
            words,
            forms: &[],
        };
        json_of(peers.python(), &peers.words(&command, &[]))?;
        Ok(Some(path))
    }

    /// Returns the peer's fastest variant, based on one run of each.
    fn fastest_form(
        &self,
        peers: &Peers,
        case: Case,
        command: &PeerCommand,
    ) -> Result<&'static [&'static str], Error> {
        let mut best = (f64::NEG_INFINITY, command.forms[0]);
        if command.forms.len() == 1 {
            return Ok(best.1);
        }
        for form in command.forms {
            // A variant that does not run here, for example because it needs a compiler, is not used for comparison.
            match run_peer(peers, case, command, form) {
                Ok(run) if run.tokens_per_s > best.0 => best = (run.tokens_per_s, form),
                Err(error) if form.is_empty() => return Err(error),
                _ => {}
            }
        }
        Ok(best.1)
    }

    fn limits(&self) -> Result<Limits, Error> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut ranks = launch(LaunchConfig::new(cores), |world| {
            Limits::measure(&world, &Device::flex())
        })?;
        let mut own = ranks.swap_remove(0);
        if let Some(peers) = self.peers {
            own.products = own.products.max(peers.product_limit(cores)?.0);
        }
        Ok(own)
    }
}

fn run_peer(
    peers: &Peers,
    case: Case,
    command: &PeerCommand,
    form: &[&str],
) -> Result<Measurement, Error> {
    let said = json_of(peers.python(), &peers.words(command, form))?;
    Measurement::read(&said, case.ranks())
}
