//! Describes wrong gradients, as far as their tags allow.

use std::fmt;
use std::ops::Range;

use burn_fsdp_mesh::field::{self, Element};

use super::Tag;

/// The largest factor to search for between the expected and the actual gradient.
const LARGEST_FACTOR: u64 = 4_096;
/// Maximum number of one rank's gradients to search one by one, in the sum and among those of earlier steps.
const MOST_NUMBERS: u64 = 256;

/// A sum of gradients of one parameter over ranks and backwards.
#[derive(Debug, Clone)]
pub(crate) struct Sum {
    parameter: usize,
    /// The numbers of each rank's gradients.
    of_ranks: Vec<Range<u64>>,
}

impl Sum {
    /// Returns the sum of those gradients of `parameter` that have these numbers on each rank.
    pub(super) fn of(parameter: usize, of_ranks: impl Iterator<Item = Range<u64>>) -> Self {
        Self {
            parameter,
            of_ranks: of_ranks.collect(),
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.of_ranks
            .iter()
            .map(|numbers| numbers.end.saturating_sub(numbers.start))
            .sum()
    }

    fn tag_of_rank(&self, rank: usize) -> Tag {
        let drawn = self.of_ranks[rank]
            .clone()
            .map(|number| Tag::draw(rank, self.parameter, number));
        drawn.fold(Tag::from(0), Tag::plus)
    }

    fn over(&self, ranks: impl Iterator<Item = usize>) -> Tag {
        ranks
            .map(|rank| self.tag_of_rank(rank))
            .fold(Tag::from(0), Tag::plus)
    }

    pub(super) fn tag(&self) -> Tag {
        self.over(0..self.of_ranks.len())
    }

    /// Returns the gradients of the sum and of earlier steps: the tag, the rank, and the number relative to the rank's
    /// first gradient.
    fn each(&self) -> impl Iterator<Item = (Tag, usize, i64)> + '_ {
        self.of_ranks
            .iter()
            .enumerate()
            .flat_map(move |(rank, numbers)| {
                let first = numbers.start.saturating_sub(MOST_NUMBERS);
                let last = numbers.end.min(numbers.start.saturating_add(MOST_NUMBERS));
                (first..last).map(move |number| {
                    (
                        Tag::draw(rank, self.parameter, number),
                        rank,
                        number as i64 - numbers.start as i64,
                    )
                })
            })
    }
}

/// Prints as `the sum of the gradients computed: 2 of rank 0 and 1 of rank 2`.
impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self
            .of_ranks
            .iter()
            .map(|numbers| numbers.end.saturating_sub(numbers.start));
        let counts = counts.enumerate().filter(|(_, count)| *count > 0);
        let mut parts: Vec<_> = counts
            .map(|(rank, count)| format!("{count} of rank {rank}"))
            .collect();
        let last = parts.pop();
        match (last, parts.is_empty()) {
            (None, _) => f.write_str("nothing, because no rank computed a gradient"),
            (Some(last), true) => write!(f, "the gradients computed: {last}"),
            (Some(last), false) => write!(
                f,
                "the sum of the gradients computed: {} and {last}",
                parts.join(", ")
            ),
        }
    }
}

/// How a gradient differs from the expected one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finding {
    /// There is no gradient.
    Nothing,
    /// There is a gradient, but none was expected.
    Uncalled,
    /// A multiple of the expected gradient.
    Times(u64),
    /// The expected gradient, divided by this number.
    Part(u64),
    /// The sum over only some of the ranks, times a factor.
    OnlyOver {
        group: String,
        ranks: usize,
        times: u64,
    },
    /// The sum without one rank's gradients.
    LacksRank(usize),
    /// The sum with one rank's gradients added twice.
    RankTwice(usize),
    /// The sum without one gradient of a rank, by its number.
    Lacks { rank: usize, number: i64 },
    /// The sum with one gradient of a rank added twice, by its number; a negative number is from an earlier
    /// step.
    Also { rank: usize, number: i64 },
    /// The gradient of another parameter.
    OfParameter(usize),
    /// Any other result.
    Other,
}

impl Finding {
    /// Describes `found`, which differs from `sum` times `scale`. `of_others` recognizes other parameters' gradients.
    pub(super) fn of(
        found: Element,
        sum: &Sum,
        scale: Tag,
        groups: &[(String, Vec<usize>)],
        of_others: impl Fn(Element) -> Option<usize>,
    ) -> Self {
        let is_found = |tag: Tag| tag.element() == Some(found);
        let whole = sum.tag().times(scale);
        let is_times = |tag: Tag, times: u64| is_found(tag.times(Tag::from(times)));
        if let Some(times) = (2..=LARGEST_FACTOR).find(|&times| is_times(whole, times)) {
            return Self::Times(times);
        }
        let part = |parts: &u64| whole.element() == Some(field::mul(found, *parts));
        if let Some(parts) = (2..=LARGEST_FACTOR).find(part) {
            return Self::Part(parts);
        }
        // Groups of one rank are skipped, so the message names the ranks whose gradients are missing.
        for (group, ranks) in groups.iter().filter(|(_, ranks)| ranks.len() > 1) {
            let over = sum.over(ranks.iter().copied()).times(scale);
            let most = sum.of_ranks.len() as u64;
            if let Some(times) = (1..=most).find(|&times| is_times(over, times)) {
                return Self::OnlyOver {
                    group: group.clone(),
                    ranks: ranks.len(),
                    times,
                };
            }
        }
        let minus = |tag: Tag| whole.plus(tag.times(scale).times(Tag::from(field::neg(1))));
        let plus = |tag: Tag| whole.plus(tag.times(scale));
        let mut ranks = 0..sum.of_ranks.len();
        if let Some(rank) = ranks
            .clone()
            .find(|&rank| is_found(minus(sum.tag_of_rank(rank))))
        {
            return Self::LacksRank(rank);
        }
        if let Some(rank) = ranks.find(|&rank| is_found(plus(sum.tag_of_rank(rank)))) {
            return Self::RankTwice(rank);
        }
        let lacks = sum.each().find(|(tag, ..)| is_found(minus(*tag)));
        if let Some((_, rank, number)) = lacks {
            return Self::Lacks { rank, number };
        }
        let also = sum.each().find(|(tag, ..)| is_found(plus(*tag)));
        if let Some((_, rank, number)) = also {
            return Self::Also { rank, number };
        }
        of_others(found).map_or(Self::Other, Self::OfParameter)
    }

    /// Returns the text for an error message; `path_of` returns the path of a parameter.
    pub(crate) fn describe(&self, path_of: impl Fn(usize) -> String) -> String {
        match self {
            Self::Nothing => {
                "no gradient at all: its reduction or its registration is missing".to_owned()
            }
            Self::Uncalled => {
                "a gradient, although none is due on this rank in this step".to_owned()
            }
            Self::Times(times) => {
                format!("{times} times that sum: added {times} times, or not divided by {times}")
            }
            Self::Part(parts) => format!("1/{parts} of that sum: divided by {parts} once more"),
            Self::OnlyOver {
                group,
                ranks,
                times,
            } => {
                let times = match times {
                    1 => String::new(),
                    times => format!(", {times} times"),
                };
                format!("the sum over only the {ranks} ranks of {group}{times}")
            }
            Self::LacksRank(rank) => format!("that sum without the gradients of rank {rank}"),
            Self::RankTwice(rank) => format!("that sum with the gradients of rank {rank} twice"),
            Self::Lacks { rank, number } => {
                format!("that sum without gradient {} of rank {rank}", number + 1)
            }
            Self::Also { rank, number } if *number < 0 => {
                format!("that sum with a gradient of an earlier step of rank {rank}")
            }
            Self::Also { rank, number } => {
                format!("that sum with gradient {} of rank {rank} twice", number + 1)
            }
            Self::OfParameter(parameter) => format!("the gradient of `{}`", path_of(*parameter)),
            Self::Other => {
                "some other sum of gradients, not the mean of each counted once".to_owned()
            }
        }
    }
}
