//! The measurements, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use crate::limits::Limits;
use crate::origin::Run;
use crate::pairs::{CaseResult, Pair};
use crate::peers::Peers;
use crate::program::Measurement;

/// The results of a benchmark.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Commit, date, machine and flags.
    run: serde_json::Value,
    #[serde(skip)]
    about: String,
    /// Version of PyTorch.
    torch: Option<String>,
    pub(crate) cases: Vec<Summary>,
}

/// The numbers of a case.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) name: String,
    ours: Side,
    peer: Option<Side>,
    pub(crate) ratio: Option<Ratio>,
    /// Operations per second of matrix products on all cores, as the median of the measurements between the pairs.
    product_limit: f64,
    /// Bytes copied per second on all cores, also as the median.
    copy_limit: f64,
    /// Maximum relative difference between the two losses of a pair, if both sides begin with equal weights.
    losses_differ: Option<f64>,
    /// The measurements that this summarizes.
    measured: CaseResult,
}

/// One side of a case, as the median of its runs.
#[derive(Debug, Serialize)]
struct Side {
    tokens_per_s: f64,
    /// Fraction of the matrix product limit.
    share: f64,
    /// Peak resident bytes of a rank, minus its resident bytes at the start.
    peak_bytes: Option<f64>,
}

/// The ratios of pairs: our tokens per second divided by the peer's.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    /// The 95 % interval of the median, by order statistics. Fewer than six pairs have none.
    pub(crate) interval: Option<[f64; 2]>,
    /// The ratios of all pairs, ascending.
    pub(crate) all: Vec<f64>,
}

impl Ratio {
    fn of(pairs: &[Pair]) -> Option<Self> {
        let ratio = |pair: &Pair| {
            let peer = pair.peer.as_ref()?;
            Some(pair.ours.tokens_per_s / peer.tokens_per_s)
        };
        let all = sorted(pairs.iter().filter_map(ratio));
        let half = 0.98 * (all.len() as f64).sqrt();
        let middle = all.len() as f64 / 2.0;
        let low = (middle - half).floor().max(0.0) as usize;
        let high = ((middle + half).ceil() as usize).min(all.len().saturating_sub(1));
        Some(Self {
            median: median(&all)?,
            interval: (all.len() >= 6).then(|| [all[low], all[high]]),
            all,
        })
    }
}

impl Side {
    fn of<'a>(
        runs: impl Iterator<Item = &'a Measurement> + Clone,
        case: &CaseResult,
        product_limit: f64,
    ) -> Option<Self> {
        let tokens_per_s = median(&sorted(runs.clone().map(|run| run.tokens_per_s)))?;
        Some(Self {
            tokens_per_s,
            share: tokens_per_s * case.case.flop_per_token() / product_limit,
            peak_bytes: median(&sorted(runs.filter_map(|run| run.peak_bytes))),
        })
    }
}

impl Summary {
    fn of(measured: CaseResult) -> Option<Self> {
        let pairs = &measured.pairs;
        let peers = pairs.iter().filter_map(|pair| pair.peer.as_ref());
        let limit = |of: fn(&Limits) -> f64| median(&sorted(measured.limits.iter().map(of)));
        let product_limit = limit(|limits| limits.products)?;
        let ours = pairs.iter().map(|pair| &pair.ours);
        Some(Self {
            name: measured.case.name(),
            ours: Side::of(ours, &measured, product_limit)?,
            peer: Side::of(peers, &measured, product_limit),
            product_limit,
            copy_limit: limit(|limits| limits.copy)?,
            ratio: Ratio::of(pairs),
            losses_differ: measured.case.shape().and_then(|_| difference(pairs)),
            measured,
        })
    }
}

impl Report {
    pub(crate) fn new(run: &Run, peers: Option<&Peers>, results: Vec<CaseResult>) -> Self {
        Self {
            about: run.to_string(),
            run: run.to_json(),
            torch: peers.map(|peers| peers.version.clone()),
            cases: results.into_iter().filter_map(Summary::of).collect(),
        }
    }

    pub(crate) fn to_json(&self) -> String {
        // The report contains only strings, numbers and lists of them, which JSON can always represent.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.about)?;
        match &self.torch {
            Some(version) => writeln!(f, "PyTorch {version}, alternating on the same cores\n")?,
            None => writeln!(f, "without PyTorch\n")?,
        }
        writeln!(
            f,
            "| case | tokens/s | PyTorch | ratio | 95 % interval | pairs | share of products | PyTorch | MiB per rank \
             | PyTorch | losses differ by |\n|---|---|---|---|---|---|---|---|---|---|---|"
        )?;
        for case in &self.cases {
            writeln!(f, "{case}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peer = self.peer.as_ref();
        let dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let mebibytes = |side: &Side| Some(format!("{:.0}", side.peak_bytes? / f64::from(1 << 20)));
        let interval = |ratio: &Ratio| {
            let [low, high] = ratio.interval?;
            Some(format!("{low:.2} to {high:.2}"))
        };
        let ratio = self.ratio.as_ref();
        let cells = [
            self.name.clone(),
            format!("{:.0}", self.ours.tokens_per_s),
            dash(peer.map(|peer| format!("{:.0}", peer.tokens_per_s))),
            dash(ratio.map(|ratio| format!("{:.2}", ratio.median))),
            dash(ratio.and_then(interval)),
            self.measured.pairs.len().to_string(),
            format!("{:.2}", self.ours.share),
            dash(peer.map(|peer| format!("{:.2}", peer.share))),
            dash(mebibytes(&self.ours)),
            dash(peer.and_then(mebibytes)),
            dash(self.losses_differ.map(|by| format!("{by:.0e}"))),
        ];
        write!(f, "| {} |", cells.join(" | "))
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the median of ascending numbers, or the mean of the middle two.
fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted.get(middle).copied(),
        _ => Some((sorted.get(middle.checked_sub(1)?)? + sorted.get(middle)?) / 2.0),
    }
}

/// Returns the maximum relative difference between two losses of the same step, or `None` if there are no such
/// losses.
fn difference(pairs: &[Pair]) -> Option<f64> {
    let of_pair = |pair: &Pair| {
        let peer = pair.peer.as_ref()?;
        let both = pair.ours.losses.iter().zip(&peer.losses);
        both.map(|(ours, theirs)| (ours - theirs).abs() / theirs.abs())
            .reduce(f64::max)
    };
    pairs.iter().filter_map(of_pair).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(tokens_per_s: f64, losses: &[f64]) -> Measurement {
        Measurement {
            tokens_per_s,
            peak_bytes: None,
            losses: losses.to_vec(),
        }
    }

    fn pair(ours: f64, peer: f64) -> Pair {
        Pair {
            ours: run(ours, &[4.0, 2.0]),
            peer: Some(run(peer, &[4.0, 2.5])),
        }
    }

    #[test]
    fn a_ratio_is_the_median_of_pairs_not_a_ratio_of_medians() {
        let pairs = [pair(1.0, 2.0), pair(30.0, 10.0), pair(4.0, 4.0)];
        let ratio = Ratio::of(&pairs).unwrap();
        assert_eq!(ratio.median, 1.0);
        assert_eq!(ratio.all, [0.5, 1.0, 3.0]);
        assert_eq!(ratio.interval, None);
        let many: Vec<Pair> = (1..=20)
            .map(|number| pair(f64::from(number), 1.0))
            .collect();
        assert_eq!(Ratio::of(&many).unwrap().interval, Some([6.0, 16.0]));
        let two = Ratio::of(&pairs[..2]).unwrap();
        assert_eq!(two.median, 1.75);
    }

    #[test]
    fn a_ratio_needs_a_peer() {
        let alone = Pair {
            ours: run(1.0, &[]),
            peer: None,
        };
        assert!(Ratio::of(std::slice::from_ref(&alone)).is_none());
        assert_eq!(difference(&[alone]), None);
    }

    #[test]
    fn losses_are_compared_step_by_step() {
        assert_eq!(difference(&[pair(1.0, 1.0)]), Some(0.2));
    }
}
