//! `train --trace`: one step as a Chrome trace.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::command::{Folder, losses};

/// A span of a trace: rank, row, start, end, name, kinds.
#[derive(Debug, Clone)]
struct Span {
    rank: u64,
    row: u64,
    start: f64,
    end: f64,
    name: String,
    kinds: String,
}

fn number(event: &Value, key: &str) -> f64 {
    let number = event[key].as_f64();
    number.unwrap_or_else(|| panic!("{key} is a number in {event}"))
}

fn span(event: &Value) -> Span {
    let start = number(event, "ts");
    assert!(number(event, "dur") >= 0.0);
    Span {
        rank: number(event, "pid") as u64,
        row: number(event, "tid") as u64,
        start,
        end: start + number(event, "dur"),
        name: event["name"].as_str().expect("a name").to_owned(),
        kinds: event["cat"].as_str().expect("a kind").to_owned(),
    }
}

fn traced(flags: &str) -> Vec<Value> {
    let folder = Folder::new();
    let report = folder.report(&format!(
        "--synthetic --warmup 1 --steps 4 {flags} --trace trace.json"
    ));
    assert_eq!(losses(&report).len(), 5);
    assert_eq!(folder.names(), ["loss.svg", "trace.json"]);
    let events: Value = serde_json::from_str(&folder.read("trace.json")).expect("JSON");
    events.as_array().expect("an array of events").clone()
}

/// Checks the properties that all traces have, and returns the spans.
fn checked(flags: &str, ranks: u64, counters: &[&str]) -> Vec<Span> {
    let events = traced(flags);
    let of_kind = |kind: &'static str| events.iter().filter(move |event| event["ph"] == kind);
    let spans: Vec<_> = of_kind("X").map(span).collect();
    assert_eq!(
        of_kind("M").count() + of_kind("X").count() + of_kind("C").count(),
        events.len(),
        "no event of another kind"
    );
    let named: BTreeSet<_> = of_kind("C")
        .filter_map(|event| event["name"].as_str())
        .collect();
    assert_eq!(named, counters.iter().copied().collect(), "{flags}");
    for rank in 0..ranks {
        let name = format!("rank {rank}");
        let is_name = |event: &&Value| event["name"] == "process_name" && event["pid"] == rank;
        let names: Vec<_> = of_kind("M").filter(is_name).collect();
        assert_eq!(names.len(), 1);
        assert_eq!(names[0]["args"]["name"], name);
        let rows =
            of_kind("M").filter(|event| event["name"] == "thread_name" && event["pid"] == rank);
        let rows: Vec<_> = rows.map(|event| event["args"]["name"].clone()).collect();
        assert_eq!(rows, ["compute", "communication"]);
        let row = |row| {
            spans
                .iter()
                .filter(move |span| span.rank == rank && span.row == row)
        };
        assert!(row(0).count() > 3, "{flags}: rank {rank} computes");
        assert!(row(1).count() > 3, "{flags}: rank {rank} communicates");
        assert!(row(1).any(|span| span.name.contains("all_gather")));
        assert!(row(1).any(|span| span.name.contains("reduce_scatter")));
        assert!(row(0).any(|span| span.kinds.contains("compute")));
        let curve = |name: &str| -> Vec<f64> {
            let of_rank = of_kind("C").filter(|event| event["pid"] == rank);
            let named = of_rank.filter(|event| event["name"] == name);
            named.map(|event| number(&event["args"], "bytes")).collect()
        };
        let memory = curve(counters[0]);
        assert!(memory.len() > 3 && memory.iter().any(|bytes| *bytes != memory[0]));
        for counter in counters {
            let curve = curve(counter);
            assert!(
                curve.len() > 3 && curve.iter().all(|bytes| *bytes >= 0.0),
                "{flags}: {counter}"
            );
        }
        for number in [0, 1] {
            let row: Vec<_> = row(number).cloned().collect();
            nested(&row, flags);
        }
    }
    assert!(spans.iter().all(|span| span.rank < ranks));
    let times = events.iter().filter_map(|event| event["ts"].as_f64());
    let times: Vec<_> = times.collect();
    assert!(times.is_sorted(), "{flags}: by time");
    // Everything belongs to one step: the ranks' steps overlap.
    let begin = |rank| {
        spans
            .iter()
            .filter(move |span| span.rank == rank)
            .map(|span| span.start)
    };
    let end = |rank| {
        spans
            .iter()
            .filter(move |span| span.rank == rank)
            .map(|span| span.end)
    };
    for rank in 1..ranks {
        assert!(begin(rank).fold(f64::MAX, f64::min) < end(0).fold(0.0, f64::max));
        assert!(begin(0).fold(f64::MAX, f64::min) < end(rank).fold(0.0, f64::max));
    }
    spans
}

/// Checks that the spans of a row are consecutive or nested.
fn nested(row: &[Span], flags: &str) {
    // Rounding of sums of microseconds.
    const ROUNDING: f64 = 1e-3;
    let mut row = row.to_vec();
    row.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
    let mut open: Vec<Span> = Vec::new();
    for span in row {
        while open
            .last()
            .is_some_and(|outer| outer.end <= span.start + ROUNDING)
        {
            open.pop();
        }
        if let Some(outer) = open.last() {
            assert!(
                span.end <= outer.end + ROUNDING,
                "{flags}: {span:?} in {outer:?}"
            );
        }
        open.push(span);
    }
}

#[test]
fn a_step_of_the_eager_engine_is_traced() {
    for (flags, ranks) in [
        ("--ranks 2", 2),
        ("--ranks 3 --prefetch 1", 3),
        ("--accumulate 2", 2),
    ] {
        let spans = checked(
            flags,
            ranks,
            &["unsharded bytes", "resident bytes of the process"],
        );
        for rank in 0..ranks {
            let phases = spans
                .iter()
                .filter(|span| span.rank == rank && span.name == span.kinds);
            let phases: Vec<_> = phases.map(|span| span.name.as_str()).collect();
            let one = ["forward", "backward"];
            let expected = if flags.contains("accumulate") {
                [&one[..], &one, &["optimizer"]].concat()
            } else {
                [&one[..], &["optimizer"]].concat()
            };
            assert_eq!(phases, expected, "{flags}");
        }
        let is_unit = |span: &&Span| span.name.contains("blocks.1") && span.row == 1;
        assert!(
            spans.iter().filter(is_unit).count() > 0,
            "{flags}: units are named"
        );
    }
}

#[test]
fn a_compiled_step_is_traced() {
    for (flags, ranks) in [
        ("--ranks 2 --compile", 2),
        ("--ranks 3 --prefetch 1 --compile", 3),
    ] {
        let spans = checked(flags, ranks, &["live tensor bytes"]);
        let has = |kind: &str| spans.iter().any(|span| span.kinds.contains(kind));
        for kind in [
            "compute",
            "communication",
            "forward",
            "backward",
            "optimizer",
        ] {
            assert!(has(kind), "{flags}: {kind}");
        }
        assert_eq!(has("wait"), flags.contains("--prefetch 1"), "{flags}");
        let attention = |span: &&Span| span.name == "Custom.models.causal_attention";
        assert_eq!(spans.iter().filter(attention).count() as u64, 2 * ranks);
    }
}

#[test]
fn short_runs_trace_the_last_step_to_a_file_of_its_own() {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 1 --trace trace.json");
    assert!(folder.read("trace.json").contains("forward"));
    let folder = Folder::new();
    let run = folder.train("--synthetic --steps 1 --trace a.svg --curve a.svg");
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("same file"), "{}", run.stderr);
    let run = folder.train("--synthetic --steps 1 --trace nowhere/trace.json");
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr
            .starts_with("error: --trace nowhere/trace.json: "),
        "{}",
        run.stderr
    );
}
