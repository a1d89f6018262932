//! Tests the auditor on miniature engines: it must accept every correct engine and reject every engine with a single
//! error.
//!
//! An engine is a list of events that describes how gradients are handled on all ranks. Tags are sent in notes, as in
//! the real engine. A mutant is a correct list with one event added, removed or changed at random, from a fixed seed.

use burn_fsdp_collectives::Reduction;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::finding::Finding;
use super::{Audit, Auditor, Due, Tag, Wanted, flags, is_flagged, scale_of, tag_of_sum, tags};

/// The size of an engine: ranks, as replicas of shards, and the parameters of each unit.
#[derive(Debug, Clone)]
struct Layout {
    shards: usize,
    replicas: usize,
    units: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    Shards,
    Replicas,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    /// A gradient is computed.
    Comes { rank: usize, parameter: usize },
    /// The gradients computed for a unit are summed over a group and divided by a number.
    Reduce { unit: usize, over: Group, by: f64 },
    /// A unit's sums are summed over the replicas.
    Cross { unit: usize },
    /// The sums of a unit are passed to Burn.
    HandOver { unit: usize },
    /// Wrong: a gradient computed for a parameter of a rank is lost.
    Lose { rank: usize, parameter: usize },
    /// Wrong: the last gradient of an earlier step is added again.
    Stale { rank: usize, parameter: usize },
    /// Wrong: the sums for two parameters are exchanged.
    Exchange { one: usize, other: usize },
    /// The end of a step's backward; `syncs` is true if units reduced.
    End { syncs: bool },
}

struct Rank {
    auditor: Auditor,
    come: Vec<Option<Tag>>,
    sums: Vec<Option<Tag>>,
    /// The tags of all gradients of each parameter so far.
    drawn: Vec<Vec<Tag>>,
}

impl Layout {
    fn random(draw: &mut StdRng) -> Self {
        let units = draw.random_range(1..4);
        Self {
            shards: draw.random_range(1..4),
            replicas: draw.random_range(1..3),
            units: (0..units).map(|_| draw.random_range(1..4)).collect(),
        }
    }

    fn ranks(&self) -> usize {
        self.shards * self.replicas
    }

    fn parameters(&self) -> usize {
        self.units.iter().sum()
    }

    fn of_unit(&self, unit: usize) -> std::ops::Range<usize> {
        let first: usize = self.units[..unit].iter().sum();
        first..first + self.units[unit]
    }

    fn unit_of(&self, parameter: usize) -> usize {
        let mut units = 0..self.units.len();
        units
            .find(|&unit| self.of_unit(unit).contains(&parameter))
            .expect("a parameter")
    }

    fn group(&self, group: Group, rank: usize) -> Vec<usize> {
        let (replica, shard) = (rank / self.shards, rank % self.shards);
        match group {
            Group::Shards => (0..self.shards)
                .map(|shard| replica * self.shards + shard)
                .collect(),
            Group::Replicas => (0..self.replicas)
                .map(|other| other * self.shards + shard)
                .collect(),
        }
    }

    /// Returns the correct events of three steps, each after up to two steps without reduction.
    fn right(&self, draw: &mut StdRng) -> Vec<Event> {
        let mut events = Vec::new();
        for _ in 0..3 {
            let held = draw.random_range(0..3);
            for micro in 0..=held {
                let syncs = micro == held;
                for unit in (0..self.units.len()).rev() {
                    for parameter in self.of_unit(unit) {
                        for rank in 0..self.ranks() {
                            let comes = Event::Comes { rank, parameter };
                            events.extend((0..draw.random_range(0..3)).map(|_| comes));
                        }
                    }
                    if syncs {
                        let by = self.ranks() as f64;
                        events.push(Event::Reduce {
                            unit,
                            over: Group::Shards,
                            by,
                        });
                        events.push(Event::Cross { unit });
                        events.push(Event::HandOver { unit });
                    }
                }
                events.push(Event::End { syncs });
            }
        }
        events
    }
}

/// Returns the summed tags of the gradients over each rank's group, from the ranks' notes.
fn carried(
    ranks: &[Vec<Option<Tag>>],
    members: impl Fn(usize) -> Vec<usize>,
    reduction: &Reduction,
) -> Vec<Vec<Option<Tag>>> {
    let notes: Vec<_> = ranks
        .iter()
        .map(|given| [flags(given.iter().copied()), tags(given.iter().copied())].concat())
        .collect();
    let of_rank = |rank: usize| {
        let members = members(rank);
        let scale = scale_of(reduction, members.len());
        let notes: Vec<_> = members
            .into_iter()
            .map(|member| notes[member].clone())
            .collect();
        let parameters = ranks[rank].len();
        let sum = |index| {
            is_flagged(&notes, index).then(|| tag_of_sum(&notes, index, parameters).times(scale))
        };
        (0..parameters).map(sum).collect()
    };
    (0..ranks.len()).map(of_rank).collect()
}

/// Runs the events on all ranks, and returns the first fault.
fn run(layout: &Layout, events: &[Event]) -> Option<Finding> {
    let parameters = layout.parameters();
    let rank = |rank| Rank {
        auditor: Auditor::new(Audit::EveryStep, rank, parameters),
        come: vec![None; parameters],
        sums: vec![None; parameters],
        drawn: vec![Vec::new(); parameters],
    };
    let mut ranks: Vec<_> = (0..layout.ranks()).map(rank).collect();
    let add = |parameter: &mut Option<Tag>, tag: Tag| {
        *parameter = Some(parameter.map_or(tag, |earlier| earlier.plus(tag)))
    };
    for rank in &mut ranks {
        rank.auditor.begin(true, Vec::new, || 0);
    }
    for event in events {
        match *event {
            Event::Comes { rank, parameter } => {
                let rank = &mut ranks[rank];
                let tag = rank.auditor.came(parameter);
                rank.drawn[parameter].push(tag);
                add(&mut rank.come[parameter], tag);
            }
            Event::Lose { rank, parameter } => {
                let rank = &mut ranks[rank];
                let tag = rank.auditor.came(parameter);
                rank.drawn[parameter].push(tag);
            }
            Event::Stale { rank, parameter } => {
                let rank = &mut ranks[rank];
                if let Some(&tag) = rank.drawn[parameter].last() {
                    add(&mut rank.come[parameter], tag);
                }
            }
            Event::Reduce { unit, over, by } => {
                let of_unit = layout.of_unit(unit);
                let given: Vec<_> = ranks
                    .iter_mut()
                    .map(|rank| {
                        rank.come[of_unit.clone()]
                            .iter_mut()
                            .map(Option::take)
                            .collect()
                    })
                    .collect();
                let reduction = Reduction::sum().post_scaled(1.0 / by);
                let sums = carried(&given, |rank| layout.group(over, rank), &reduction);
                for (rank, sums) in ranks.iter_mut().zip(sums) {
                    rank.sums[of_unit.clone()].copy_from_slice(&sums);
                }
            }
            Event::Cross { unit } => {
                let of_unit = layout.of_unit(unit);
                let given: Vec<_> = ranks
                    .iter()
                    .map(|rank| rank.sums[of_unit.clone()].to_vec())
                    .collect();
                let sums = carried(
                    &given,
                    |rank| layout.group(Group::Replicas, rank),
                    &Reduction::sum(),
                );
                for (rank, sums) in ranks.iter_mut().zip(sums) {
                    rank.sums[of_unit.clone()].copy_from_slice(&sums);
                }
            }
            Event::Exchange { one, other } => {
                ranks.iter_mut().for_each(|rank| rank.sums.swap(one, other));
            }
            Event::HandOver { unit } => {
                for rank in &mut ranks {
                    for parameter in layout.of_unit(unit) {
                        if let Some(tag) = rank.sums[parameter] {
                            rank.auditor.arrived(parameter, tag);
                        }
                    }
                }
            }
            Event::End { syncs } => {
                if let Some(finding) = end(layout, &mut ranks, syncs) {
                    return Some(finding);
                }
            }
        }
    }
    None
}

/// Ends a step on all ranks, and returns the first fault.
fn end(layout: &Layout, ranks: &mut [Rank], syncs: bool) -> Option<Finding> {
    let told: Vec<_> = ranks.iter().map(|rank| rank.auditor.tell()).collect();
    let scale = scale_of(&Reduction::mean(layout.ranks()), layout.ranks());
    let mut first = None;
    for (index, rank) in ranks.iter_mut().enumerate() {
        rank.auditor.hear(told.iter().map(Vec::as_slice));
        let groups = [Group::Shards, Group::Replicas]
            .map(|group| (format!("{group:?}"), layout.group(group, index)));
        let wanted = |_| Wanted {
            due: if syncs { Due::Yes } else { Due::No },
            scale,
        };
        let fault = rank.auditor.fault(|_| groups.to_vec(), wanted);
        first = first.or(fault.map(|fault| fault.finding));
        rank.auditor.end_step(|_| syncs);
        rank.sums.fill(None);
        rank.auditor.begin(true, Vec::new, || 0);
    }
    first
}

/// The kinds of errors in an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    LostReduction,
    LostResult,
    SecondTime,
    NoCrossing,
    CrossedTwice,
    OtherGroup,
    NotDivided,
    DividedTwice,
    Exchanged,
    LostGradient,
    OldGradient,
}

const ALL: [Wrong; 11] = [
    Wrong::LostReduction,
    Wrong::LostResult,
    Wrong::SecondTime,
    Wrong::NoCrossing,
    Wrong::CrossedTwice,
    Wrong::OtherGroup,
    Wrong::NotDivided,
    Wrong::DividedTwice,
    Wrong::Exchanged,
    Wrong::LostGradient,
    Wrong::OldGradient,
];

/// Returns `events` with a random error of this kind; `None` if none fits, or it would not affect a sum.
fn mutated(
    layout: &Layout,
    events: &[Event],
    wrong: Wrong,
    draw: &mut StdRng,
) -> Option<Vec<Event>> {
    let is_kind = |event: &Event| match wrong {
        Wrong::LostReduction | Wrong::OtherGroup | Wrong::NotDivided | Wrong::DividedTwice => {
            matches!(event, Event::Reduce { .. })
        }
        Wrong::LostResult | Wrong::SecondTime | Wrong::Exchanged => {
            matches!(event, Event::HandOver { .. })
        }
        Wrong::NoCrossing | Wrong::CrossedTwice => matches!(event, Event::Cross { .. }),
        Wrong::LostGradient | Wrong::OldGradient => matches!(event, Event::Comes { .. }),
    };
    let candidates: Vec<_> = (0..events.len())
        .filter(|&index| is_kind(&events[index]))
        .collect();
    let at = *candidates.get(draw.random_range(0..candidates.len().max(1)))?;
    let mut mutant = events.to_vec();
    // The gradients of a unit that were computed before this event, since the unit was last passed to Burn.
    let came = |unit: usize| {
        let before = &events[..at];
        let last = before
            .iter()
            .rposition(|event| *event == Event::HandOver { unit });
        let since = &before[last.map_or(0, |last| last + 1)..];
        let parameters = since.iter().filter_map(|event| match event {
            Event::Comes { rank, parameter } if layout.of_unit(unit).contains(parameter) => {
                Some((*rank, *parameter))
            }
            _ => None,
        });
        parameters.collect::<Vec<_>>()
    };
    let is_empty = |unit: usize| came(unit).is_empty();
    match (wrong, events[at]) {
        (_, Event::Reduce { unit, .. } | Event::Cross { unit } | Event::HandOver { unit })
            if is_empty(unit) =>
        {
            return None;
        }
        (Wrong::LostReduction | Wrong::LostResult, _) => _ = mutant.remove(at),
        (Wrong::NoCrossing, _) if layout.replicas == 1 => return None,
        (Wrong::NoCrossing, Event::Cross { unit }) => {
            // If the sum covers all gradients even without this reduction, dropping it is no error.
            let ranks = came(unit);
            let of_replica = |replica: usize| {
                ranks
                    .iter()
                    .filter(|(rank, _)| rank / layout.shards == replica)
                    .count()
            };
            if (0..layout.replicas).any(|replica| of_replica(replica) == ranks.len()) {
                return None;
            }
            _ = mutant.remove(at);
        }
        (Wrong::CrossedTwice, _) if layout.replicas == 1 => return None,
        (Wrong::SecondTime | Wrong::CrossedTwice, event) => mutant.insert(at, event),
        (Wrong::OtherGroup, _) if layout.shards == 1 || layout.replicas == 1 => return None,
        (Wrong::OtherGroup, Event::Reduce { unit, by, .. }) => {
            mutant[at] = Event::Reduce {
                unit,
                over: Group::Replicas,
                by,
            };
        }
        (Wrong::NotDivided | Wrong::DividedTwice, _) if layout.ranks() == 1 => return None,
        (Wrong::NotDivided, Event::Reduce { unit, over, .. }) => {
            mutant[at] = Event::Reduce {
                unit,
                over,
                by: 1.0,
            };
        }
        (Wrong::DividedTwice, Event::Reduce { unit, over, by }) => {
            mutant[at] = Event::Reduce {
                unit,
                over,
                by: by * by,
            };
        }
        (Wrong::Exchanged, Event::HandOver { unit }) => {
            let one = came(unit)[0].1;
            let mut others = layout
                .of_unit(layout.unit_of(one))
                .filter(|other| *other != one);
            let other = others.next()?;
            mutant.insert(at, Event::Exchange { one, other });
        }
        (Wrong::LostGradient, Event::Comes { rank, parameter }) => {
            mutant[at] = Event::Lose { rank, parameter }
        }
        (Wrong::OldGradient, Event::Comes { rank, parameter }) => {
            mutant.insert(at + 1, Event::Stale { rank, parameter })
        }
        (wrong, event) => unreachable!("{wrong:?} of {event:?}"),
    }
    Some(mutant)
}

#[test]
fn right_engines_are_never_refused() {
    for seed in 0..200 {
        let mut draw = StdRng::seed_from_u64(seed);
        let layout = Layout::random(&mut draw);
        let events = layout.right(&mut draw);
        assert_eq!(run(&layout, &events), None, "seed {seed}, {layout:?}");
    }
}

#[test]
fn every_mutant_is_refused_and_most_are_named() {
    let mut numbers = [0; ALL.len()];
    let mut unnamed = 0;
    let mut seed = 0;
    while numbers.iter().any(|number| *number < 40) {
        let mut draw = StdRng::seed_from_u64(seed);
        let layout = Layout::random(&mut draw);
        let events = layout.right(&mut draw);
        let kind = seed as usize % ALL.len();
        if let Some(mutant) = mutated(&layout, &events, ALL[kind], &mut draw) {
            let finding = run(&layout, &mutant);
            let finding = finding.unwrap_or_else(|| {
                panic!("seed {seed}: {:?} is not seen in {layout:?}", ALL[kind])
            });
            expect_name(ALL[kind], &finding, seed);
            unnamed += usize::from(finding == Finding::Other);
            numbers[kind] += 1;
        }
        seed += 1;
        assert!(seed < 20_000, "mutants of each kind: {numbers:?}");
    }
    let mutants: usize = numbers.iter().sum();
    assert!(mutants >= 440);
    // Two exchanges at once, or a group that is neither axis, cannot be named.
    assert!(
        unnamed * 10 < mutants,
        "{unnamed} of {mutants} have no name"
    );
}

/// Checks that a finding describes the error. Several findings may be correct for one error: for example, if a sum
/// covers only one group, it also lacks the other ranks. For [`Wrong::OtherGroup`], any finding is accepted.
fn expect_name(wrong: Wrong, finding: &Finding, seed: u64) {
    use Finding::{
        Also, Lacks, LacksRank, Nothing, OfParameter, OnlyOver, Part, RankTwice, Times, Uncalled,
    };
    let is_named = match wrong {
        Wrong::LostReduction | Wrong::LostResult => *finding == Nothing,
        Wrong::SecondTime => *finding == Times(2),
        Wrong::CrossedTwice | Wrong::NotDivided => matches!(finding, Times(_)),
        Wrong::DividedTwice => matches!(finding, Part(_)),
        Wrong::NoCrossing => matches!(
            finding,
            OnlyOver { .. } | LacksRank(_) | Lacks { .. } | Nothing
        ),
        Wrong::LostGradient => matches!(
            finding,
            OnlyOver { .. } | LacksRank(_) | Lacks { .. } | Nothing
        ),
        Wrong::OldGradient => matches!(
            finding,
            OnlyOver { .. } | RankTwice(_) | Also { .. } | Times(2)
        ),
        Wrong::Exchanged => matches!(finding, OfParameter(_) | Uncalled | Nothing),
        Wrong::OtherGroup => true,
    };
    assert!(is_named, "seed {seed}: {wrong:?} is called {finding:?}");
}

#[test]
fn only_new_orders_are_audited() {
    let mut auditor = Auditor::new(Audit::NewOrders, 0, 1);
    let mut audits = |choice: bool, order: u64| {
        auditor.begin(true, || vec![choice], || order);
        let audits = auditor.is_auditing();
        auditor.end_step(|_| true);
        audits
    };
    let seen = [
        audits(true, 0),
        audits(true, 7),
        audits(true, 7),
        audits(false, 7),
        audits(true, 7),
        audits(false, 7),
        audits(true, 8),
        audits(true, 8),
    ];
    assert_eq!(seen, [true, true, false, true, false, false, true, false]);
}

#[test]
fn silent_ranks_are_not_judged() {
    let mut auditor = Auditor::new(Audit::EveryStep, 0, 1);
    auditor.begin(true, Vec::new, || 0);
    auditor.came(0);
    let told = auditor.tell();
    let wanted = |_| Wanted {
        due: Due::Yes,
        scale: Tag::from(1),
    };
    // One rank sends nothing, and then one repeats another's message.
    for others in [Vec::new(), told.clone()] {
        auditor.hear([told.as_slice(), &others].into_iter());
        assert!(auditor.fault(|_| Vec::new(), wanted).is_none());
    }
    auditor.hear([told.as_slice()].into_iter());
    assert!(auditor.fault(|_| Vec::new(), wanted).is_some());
    assert_eq!(auditor.num_audited(), 0);
}
