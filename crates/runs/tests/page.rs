//! The page: what it draws, and that it is well-formed whatever the runs are called.

use std::path::PathBuf;

use burn_fsdp_runs::{Run, StepLine, page};

fn line(step: u64, loss: f64) -> StepLine {
    let text = format!("{{\"step\":{step},\"loss\":0}}");
    let line: StepLine = serde_json::from_str(&text).expect("a line");
    StepLine { loss, ..line }
}

fn run(name: &str, steps: Vec<StepLine>) -> Run {
    Run {
        name: name.to_owned(),
        path: PathBuf::from(format!("runs/{name}")),
        steps,
        num_restarts: 0,
        num_skipped: 0,
    }
}

fn losses(count: u64) -> Vec<StepLine> {
    let loss = |step: u64| 5.0 - (step as f64).ln_1p() / 4.0;
    (0..count).map(|step| line(step, loss(step))).collect()
}

/// Returns the chart with this title.
fn chart<'a>(page: &'a str, title: &str) -> Option<&'a str> {
    let start = page.find(&format!("<b>{title}</b>"))?;
    let rest = &page[start..];
    Some(&rest[..rest.find("</figure>").expect("an end")])
}

/// Returns the numbers of points in the lines of a class of a run.
fn num_points(chart: &str, run: usize, class: &str) -> Vec<usize> {
    let groups = chart.split("<g class=\"run run-").skip(1);
    let groups = groups.filter_map(|group| group.strip_prefix(&format!("{run}\"")));
    let groups = groups.map(|group| &group[..group.find("</g>").expect("an end")]);
    let start = format!("<polyline class=\"{class}\" points=\"");
    let lines = groups.flat_map(|group| group.split(&start).skip(1).collect::<Vec<_>>());
    let points = lines.map(|line| &line[..line.find('"').expect("an end")]);
    points.map(|points| points.split(' ').count()).collect()
}

/// Asserts that the elements of a page are nested, and that it refers to nothing outside.
fn assert_well_formed(page: &str) {
    const EMPTY: [&str; 2] = ["meta", "input"];
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page.strip_prefix("<!doctype html>").expect("a page");
    while let Some(start) = rest.find('<') {
        rest = &rest[start + 1..];
        let tag = &rest[..rest.find('>').expect("the end of a tag")];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "{open:?}");
        } else if !tag.ends_with('/') {
            let name = tag.split(' ').next().unwrap_or_default();
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
            if !EMPTY.contains(&name) {
                open.push(name);
            }
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "<{tag}>");
    }
    assert!(open.is_empty(), "{open:?}");
    for outside in ["http:", "https:", "<script", "<link", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn lines_have_a_point_for_each_step() {
    let mut second = losses(20);
    for step in [9, 19] {
        second[step].eval_loss = Some(4.0);
    }
    let page = page(&[run("first", losses(30)), run("second", second)]);
    assert_well_formed(&page);
    let chart = chart(&page, "Loss").expect("a chart");
    assert_eq!(num_points(chart, 0, "line"), [30]);
    assert_eq!(num_points(chart, 1, "line"), [20]);
    assert_eq!(num_points(chart, 0, "held-out"), [] as [usize; 0]);
    assert_eq!(num_points(chart, 1, "held-out"), [2]);
    assert_eq!(chart.matches("<circle").count(), 2);
    assert!(chart.contains("dashed: held-out text"));
    assert!(
        chart.contains(
            "<title>step 9\nfirst: 4.424\nsecond: 4.424\nsecond (held out): 4.000</title>"
        )
    );
}

#[test]
fn long_runs_are_smoothed_and_thinned() {
    let page = page(&[run("short", losses(100)), run("long", losses(100_000))]);
    let chart = chart(&page, "Loss").expect("a chart");
    assert!(chart.contains("mean of 5 to 4001 steps"), "the key");
    assert_eq!(num_points(chart, 0, "faint"), [100]);
    assert_eq!(num_points(chart, 0, "line"), [100]);
    for class in ["faint", "line"] {
        let points = num_points(chart, 1, class);
        assert!(
            points.len() == 1 && (600..=1200).contains(&points[0]),
            "{class}: {points:?}"
        );
    }
    assert!(page.len() < 100_000, "{} bytes", page.len());
}

#[test]
fn losses_that_are_not_finite_are_gaps_and_notes() {
    let mut steps = losses(10);
    steps[4].loss = f64::NAN;
    steps[8].loss = f64::INFINITY;
    let mut diverged = run("diverged", steps);
    diverged.num_restarts = 1;
    diverged.num_skipped = 2;
    let page = page(&[diverged]);
    assert_well_formed(&page);
    let chart = chart(&page, "Loss").expect("a chart");
    assert_eq!(num_points(chart, 0, "line"), [4, 3]);
    // The last step has no neighbors.
    assert_eq!(chart.matches("<circle").count(), 1);
    for note in [
        "2 losses are not finite, the first in step 4",
        "went back to an earlier step 1 time;",
        "2 lines are not a complete step",
    ] {
        assert!(page.contains(note), "{note}");
    }
    assert!(!page.contains("NaN"));
}

#[test]
fn names_do_not_break_the_page() {
    let names = ["<b>&", "</script>\"'", "\u{1b}[31m\u{0}", "-->", "a", "a"];
    let mut runs: Vec<Run> = names.iter().map(|name| run(name, losses(3))).collect();
    runs[5].path = PathBuf::from("other/a");
    let page = page(&runs);
    assert_well_formed(&page);
    assert!(page.contains("&lt;b&gt;&amp;") && !page.contains("<b>&"));
    assert!(!page.contains("</script>"));
    // Runs of the same name are told apart by their paths.
    assert!(page.contains("</i>runs/a</th>") && page.contains("</i>other/a</th>"));
}

#[test]
fn there_are_charts_only_of_what_the_runs_have() {
    let titles = [
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Throughput per rank",
        "Resident memory",
        "Full tensors",
    ];
    let drawn = |line: &StepLine| -> Vec<&str> {
        let page = page(&[run("a", vec![line.clone()])]);
        assert_well_formed(&page);
        let is_drawn = |title: &&str| chart(&page, title).is_some();
        titles.into_iter().filter(is_drawn).collect()
    };
    let mut line = line(0, 1.0);
    assert_eq!(drawn(&line), [] as [&str; 0]);
    line.lr = Some(0.0);
    line.grad_norm = Some(1.0);
    line.tokens_per_s = Some(1000.0);
    line.ranks = Some(1);
    assert_eq!(drawn(&line), titles[..3]);
    line.ranks = Some(2);
    line.rss_bytes = Some(1 << 30);
    line.unsharded_bytes = Some(1 << 20);
    assert_eq!(drawn(&line), titles);
}

#[test]
fn the_table_has_the_final_numbers() {
    let mut steps = losses(20);
    for (index, line) in steps.iter_mut().enumerate() {
        line.measured = index > 0;
        line.tokens_per_s = Some(if index == 0 { 1.0 } else { 12_000.0 });
        line.step_ms = Some(400_000.0);
        line.ranks = Some(2);
        line.rss_bytes = Some((1 << 30) - index as u64);
        line.lr = Some(2e-5);
        line.eval_loss = [(3, 4.25), (7, 4.0), (19, 4.5)]
            .into_iter()
            .find_map(|(step, loss)| (step == index).then_some(loss));
    }
    let page = page(&[run("full", steps), run("bare", losses(1))]);
    let row = |name: &str| -> Vec<String> {
        let start = page.find(&format!("</i>{name}</th>")).expect("a row");
        let row = &page[start..start + page[start..].find("</tr>").expect("an end")];
        let cells = row.split("<td>").skip(1);
        cells
            .map(|cell| cell.trim_end().replace("</td>", ""))
            .collect()
    };
    assert_eq!(
        row("full"),
        [
            "20",
            "2",
            "4.251",
            "4.257",
            "4.500",
            "4.000 <small>at 7</small>",
            "2e-5",
            "12\u{2009}000",
            "1024",
            "2:13:20",
        ]
    );
    let none = "\u{2013}";
    let bare = ["1", none, "5.000", none, none, none, none, none, none, none];
    assert_eq!(row("bare"), bare);
}

#[test]
fn many_runs_have_different_colors() {
    let runs: Vec<Run> = (0..30)
        .map(|index| run(&index.to_string(), losses(2)))
        .collect();
    let page = page(&runs);
    for query in ["light", "dark"] {
        let start = page.find(&format!(
            "(prefers-color-scheme: {query}) {{ :root {{ --run-0"
        ));
        let rules = &page[start.expect("rules")..];
        let rules = &rules[..rules.find('}').expect("an end")];
        let mut colors: Vec<&str> = rules.split("--run-").skip(1).collect();
        assert_eq!(colors.len(), 30);
        for color in &mut colors {
            *color = color.split_once(':').expect("a color").1;
        }
        colors.sort_unstable();
        colors.dedup();
        assert_eq!(colors.len(), 30, "{query}");
    }
}
