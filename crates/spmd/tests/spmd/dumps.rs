//! Graphs in files: each pass of each plan, its changes, and pictures.

use std::fs;
use std::path::{Path, PathBuf};

use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::graph::{Graph, Node, Phase, Role};
use burn_fsdp_spmd::passes::schedule::{self, OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{GraphTransform, PassId};
use burn_fsdp_spmd::trace::{OptimizerStep, TraceConfig, trace};
use burn_fsdp_spmd::{DumpError, Error, Evaluation, GraphDump, Mode, Strategy, compile};
use tempfile::TempDir;

use crate::compiled::seeded;
use crate::models::{Gpt, tokens};

/// The passes of full sharding that prefetches, in their order.
const PASSES: [&str; 18] = [
    "00-trace",
    "01-units",
    "02-dead-code",
    "03-common-subexpressions",
    "04-stand-ins",
    "05-use-kernels",
    "06-recompute",
    "07-insert-collectives",
    "08-deduplicate-collectives",
    "09-regather",
    "10-bucket-collectives",
    "11-split-collectives",
    "12-prefetch",
    "13-sink-waits",
    "14-early-optimizer",
    "15-fuse-pointwise",
    "16-select-kernels",
    "17-liveness",
];

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let names = entries.map(|entry| name(entry).into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// The names of the graphs of a plan, in their order.
fn stages(folder: &Path) -> Vec<String> {
    let names = names(folder).into_iter();
    let texts = names.filter_map(|name| name.strip_suffix(".txt").map(str::to_owned));
    texts.filter(|name| name != "changes").collect()
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// Returns the section of a pass in the file of changes.
fn section(folder: &Path, name: &str) -> String {
    let changes = read(folder.join("changes.txt"));
    let mut sections = changes.split("\n\n");
    let section = sections.find(|section| section.trim_start().starts_with(name));
    section
        .unwrap_or_else(|| panic!("{name}: {changes}"))
        .to_owned()
}

fn options() -> Options {
    Options::default().prefetch(true)
}

fn traced() -> Graph {
    let batch = tokens(0, 0, 2, &Device::flex());
    let optimizer = AdamWConfig::new().build();
    let config = TraceConfig {
        step: OptimizerStep::First,
        ..TraceConfig::default()
    };
    trace(Gpt::new, Gpt::loss, &optimizer, &batch, config).unwrap()
}

fn stages_of(options: &Options) -> Vec<Graph> {
    let pipeline = schedule::pipeline(2, Strategy::FullShard, options, &[]);
    pipeline.stages(traced()).unwrap()
}

/// Losses of two steps on each rank, and the fingerprint and text of the plan.
type Trained = (Vec<f64>, Vec<(u64, String)>);

/// Trains on two ranks, both told to write graphs if there is a folder.
fn train(folder: Option<&Path>) -> Vec<Trained> {
    let _guard = seeded();
    Device::flex().seed(3);
    let folder = folder.map(Path::to_owned);
    let rank = move |world: ProcessGroup| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).options(options());
        let mode = match &folder {
            Some(folder) => mode.dump(folder),
            None => mode,
        };
        let optimizer = AdamWConfig::new().build();
        let mut step = compile(Gpt::new, Gpt::loss, optimizer, mode)?;
        let (mut losses, mut plans) = (Vec::new(), Vec::new());
        for number in 0..3 {
            let batch = tokens(number, 2 * world.rank(), 2, &Device::flex());
            losses.push(step.step(1e-2, &batch)?);
            let plan = step.graph().expect("a plan has run");
            plans.push((plan.fingerprint(), plan.to_string()));
        }
        Ok::<_, Error>((losses, plans))
    };
    launch(LaunchConfig::new(2), rank).unwrap()
}

#[test]
fn every_pass_of_every_plan_is_dumped() {
    let folder = TempDir::new().unwrap();
    let trained = train(Some(folder.path()));
    // One rank writes, and makes two plans: for the first step, and for later ones.
    assert_eq!(names(folder.path()), ["graph-0", "graph-1"]);
    let first = folder.path().join("graph-0");
    let expected = stages_of(&options());
    assert_eq!(stages(&first), PASSES);
    for (name, graph) in PASSES.iter().zip(&expected) {
        let text = read(first.join(format!("{name}.txt")));
        assert_eq!(text, graph.to_string(), "{name}");
    }
    let later = folder.path().join("graph-1");
    assert_eq!(stages(&later), PASSES);
    let (_, plans) = &trained[0];
    for (folder, (fingerprint, plan)) in [(&first, &plans[0]), (&later, &plans[1])] {
        assert_eq!(read(folder.join("17-liveness.txt")), *plan);
        let end = section(folder, "The plan ends with 17-liveness");
        assert!(end.contains(&format!("{fingerprint:016x}")), "{end}");
    }
    let heads = [&first, &later].map(|folder| read(folder.join("changes.txt")));
    assert!(
        heads[0].starts_with("a step of one batch: input 0 "),
        "{}",
        heads[0]
    );
    assert!(
        heads[0].contains("no state of the optimizer"),
        "{}",
        heads[0]
    );
    assert!(
        !heads[1].contains("no state of the optimizer"),
        "{}",
        heads[1]
    );
}

#[test]
fn a_dump_changes_no_plan_and_no_loss() {
    let folder = TempDir::new().unwrap();
    assert_eq!(train(Some(folder.path())), train(None));
    assert_eq!(names(folder.path()), ["graph-0", "graph-1"]);
}

/// A pass of the user.
#[derive(Debug)]
struct Pass(&'static str, fn(Graph) -> Result<Graph, Error>);

impl GraphTransform for Pass {
    fn id(&self) -> PassId {
        PassId::User(self.0)
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        (self.1)(graph)
    }
}

#[test]
fn changes_describe_each_pass_even_if_it_changed_nothing() {
    let folder = TempDir::new().unwrap();
    let nothing = std::sync::Arc::new(Pass("does / nothing", Ok));
    let pipeline = schedule::pipeline(2, Strategy::FullShard, &options(), &[nothing]);
    let stages = pipeline.stages(traced()).unwrap();
    let written = GraphDump::new(folder.path())
        .write("a GPT", &stages)
        .unwrap();
    let units = section(&written, "01-units");
    assert!(units.contains("no node has changed"), "{units}");
    assert!(units.contains("\"blocks.1\" (16 parameters)"), "{units}");
    let nothing = section(&written, "10-does---nothing");
    assert!(nothing.contains("nothing has changed"), "{nothing}");
    // The numbers match the graphs.
    let nodes = |index: usize| stages[index].nodes().len();
    let equal = section(&written, "03-common-subexpressions");
    let gone = nodes(2) - nodes(3);
    assert!(gone > 0);
    let counts = format!(
        "{} -> {} nodes, 0 added, {gone} removed, ",
        nodes(2),
        nodes(3)
    );
    assert!(equal.contains(&counts), "{counts}: {equal}");
    let removed = equal.lines().find_map(|line| line.strip_prefix("  - "));
    let removed = removed.expect("the first lines are shown");
    let has = |index: usize| {
        stages[index]
            .to_string()
            .lines()
            .any(|line| line == removed)
    };
    assert!(has(2) && !has(3), "{removed}");
    let early = section(&written, "15-early-optimizer");
    assert!(early.contains("0 added, 0 removed, 0 changed, "), "{early}");
    assert!(early.contains("\n  ~ "), "{early}");
    // Every collective that travels with others is named where it is joined, and nowhere else.
    let bucket = section(&written, "11-bucket-collectives");
    let joined = stages[11]
        .collectives()
        .filter(|(_, of)| of.parts.len() > 1);
    let joined: Vec<_> = joined.map(|(_, collective)| collective).collect();
    assert!(joined.len() > 4);
    for collective in joined {
        let label = &collective.label;
        let line = bucket.lines().find(|line| {
            line.trim_start()
                .starts_with(&format!("joined: {} [{label}] of ", collective.kind))
        });
        let line = line.unwrap_or_else(|| panic!("{label}: {bucket}"));
        for part in &collective.parts {
            assert!(line.contains(&*part.path), "{}: {line}", part.path);
        }
    }
    let changes = read(written.join("changes.txt"));
    assert_eq!(
        changes.matches("joined: ").count(),
        bucket.matches("joined: ").count()
    );
}

#[test]
fn pictures_have_every_node() {
    let folder = TempDir::new().unwrap();
    let stages = stages_of(&options());
    let written = GraphDump::new(folder.path())
        .write("a GPT", &stages)
        .unwrap();
    for (name, graph) in PASSES.iter().zip(&stages) {
        let dot = read(written.join(format!("{name}.dot")));
        assert!(
            dot.starts_with("digraph ") && dot.ends_with("}\n"),
            "{name}"
        );
        assert_eq!(dot.matches('{').count(), dot.matches('}').count(), "{name}");
        let lines: Vec<&str> = dot.lines().map(str::trim_start).collect();
        let mut shown = 0;
        for (index, node) in graph.nodes().iter().enumerate() {
            let start = format!("n{index} [label=\"{index} {}", node.name());
            let is_shown = lines.iter().any(|line| line.starts_with(&start));
            assert_eq!(is_shown, !node.is_drop(), "{name}: {start}");
            shown += usize::from(is_shown);
        }
        let svg = read(written.join(format!("{name}.svg")));
        assert!(
            svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
            "{name}"
        );
        assert_eq!(svg.matches("<g>").count(), svg.matches("</g>").count());
        // Boxes count the computing operations, and name a single one. The other boxes are collectives.
        let titles = svg.split("<g><title>").skip(1);
        let counted = titles.filter_map(|title| {
            let (_, said) = title.lines().next()?.split_once(": ")?;
            let number = said.split_once(" operations, ");
            Some(number.map_or(1, |(number, _)| number.parse::<usize>().unwrap()))
        });
        let collectives = graph.nodes().iter();
        let collectives = collectives.filter(|node| node.collective.is_some());
        assert_eq!(
            counted.sum::<usize>() + collectives.count(),
            shown,
            "{name}"
        );
    }
    let svg = read(written.join("17-liveness.svg"));
    for said in [
        "blocks.2: ",
        "start_all_gather ",
        ", blocks.1 (",
        "wait_reduce_scatter",
        "kept</title>",
    ] {
        assert!(svg.contains(said), "{said}");
    }
}

#[test]
fn names_with_any_characters_are_drawn() {
    let name = "a\\\"<b>&\n\u{1}";
    let mut graph = Graph::new();
    let id = graph.add_value([2], DType::F32, Role::Input(name.into()));
    graph.add_input(id);
    let out = graph.add_value([2], DType::F32, Role::Temporary);
    let exp = burn_ir::UnaryOpIr {
        input: graph.read(id).unwrap(),
        out: graph.write(out).unwrap(),
    };
    let exp = burn_ir::FloatOperationIr::Exp(exp);
    let exp = burn_ir::OperationIr::Float(DType::F32, exp);
    graph.push(Node::new(exp, Phase::Forward));
    let folder = TempDir::new().unwrap();
    let written = GraphDump::new(folder.path()).write(name, &[graph]).unwrap();
    let dot = read(written.join("00-trace.dot"));
    assert!(
        dot.contains(r#"label="%0 input a\\\"<b>&\n \nf32[2]""#),
        "{dot}"
    );
    let svg = read(written.join("00-trace.svg"));
    assert!(svg.contains("the whole model: Exp"), "{svg}");
    for text in [dot, svg] {
        assert!(!text.contains('\u{1}'), "{text}");
    }
}

#[test]
fn shapes_micro_batches_and_evaluations_have_their_own_graphs() {
    let folder = TempDir::new().unwrap();
    let _guard = seeded();
    let mode = Mode::single().dump(folder.path());
    let device = Device::flex();
    let optimizer = || AdamWConfig::new().build();
    let mut step = compile(Gpt::new, Gpt::loss, optimizer(), mode.clone()).unwrap();
    let batch = |rows| tokens(0, 0, rows, &device);
    step.step(1e-2, &batch(2)).unwrap();
    step.step(1e-2, &batch(3)).unwrap();
    // A shape that already has a plan.
    step.step(1e-2, &batch(3)).unwrap();
    step.step_accumulated(1e-2, &[batch(2), batch(2)]).unwrap();
    let mut logits = Evaluation::new(Gpt::new, Gpt::logits);
    let (inputs, _) = batch(2);
    let _: Tensor<3> = step.evaluate(&mut logits, &inputs).unwrap();
    // Another step, of a clone of the mode.
    let mode = mode.options(Options::default().optimizer(OptimizerPlace::InNextForward));
    let mut other = compile(Gpt::new, Gpt::loss, optimizer(), mode).unwrap();
    other.step(1e-2, &batch(2)).unwrap();
    let expected = [
        ("a step of one batch: input 0 i32[2, 6]", ""),
        ("a step of one batch: input 0 i32[3, 6]", ""),
        (
            "a step of 2 micro-batches: input 0 i32[2, 6]",
            "first-liveness next-liveness update-liveness",
        ),
        ("an evaluation: input batch i32[2, 6]", ""),
        (
            "a step of one batch: input 0 i32[2, 6]",
            "setup-liveness main-liveness cleanup-liveness",
        ),
    ];
    assert_eq!(
        names(folder.path()).len(),
        expected.len(),
        "{:?}",
        names(folder.path())
    );
    for (number, (head, last)) in expected.into_iter().enumerate() {
        let written = folder.path().join(format!("graph-{number}"));
        let changes = read(written.join("changes.txt"));
        assert!(changes.starts_with(head), "{number}: {changes}");
        let stages = stages(&written);
        assert!(stages[0] == "00-trace" && stages.last().unwrap().ends_with("liveness"));
        for name in last.split_whitespace() {
            assert!(
                stages.iter().any(|stage| stage.ends_with(name)),
                "{name}: {stages:?}"
            );
        }
        // Each part comes from the whole graph that was divided.
        for part in ["next-accumulate", "main-deferred-optimizer"] {
            if let Some(stage) = stages.iter().find(|stage| stage.ends_with(part)) {
                let section = section(&written, stage);
                assert!(!section.contains("liveness"), "{section}");
            }
        }
    }
    // Only compiled steps write graphs.
    let graph = traced();
    burn_fsdp_spmd::lower(graph, &Mode::single().dump(folder.path().join("no"))).unwrap();
    assert!(!folder.path().join("no").exists());
}

#[test]
fn rejected_plans_are_dumped_up_to_the_failure() {
    let folder = TempDir::new().unwrap();
    let _guard = seeded();
    let fails = Pass("fails", |_| Err(Error::Internal("as planned".to_owned())));
    let mode = Mode::single().transform(fails).dump(folder.path());
    let optimizer = AdamWConfig::new().build();
    let mut step = compile(Gpt::new, Gpt::loss, optimizer, mode).unwrap();
    let error = step
        .step(1e-2, &tokens(0, 0, 2, &Device::flex()))
        .unwrap_err();
    assert!(error.to_string().contains("as planned"), "{error}");
    let written = folder.path().join("graph-0");
    assert_eq!(
        stages(&written).last().unwrap(),
        "08-deduplicate-collectives"
    );
    let end = section(&written, "There is no plan");
    assert!(end.contains("as planned"), "{end}");
}

fn write_one(folder: &Path) -> Result<PathBuf, Error> {
    let options = Options::none();
    GraphDump::new(folder).write("a GPT", &stages_of(&options))
}

#[test]
fn graphs_of_an_earlier_run_are_replaced_and_nothing_else() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("deep/graphs");
    let dump = GraphDump::new(&path);
    dump.check().unwrap();
    assert_eq!(
        names(folder.path()),
        [""; 0],
        "a check leaves nothing behind"
    );
    let stages = stages_of(&options());
    for _ in 0..3 {
        dump.write("a GPT", &stages).unwrap();
    }
    fs::write(path.join("graphs.md"), "mine").unwrap();
    fs::create_dir(path.join("graph-of-mine")).unwrap();
    write_one(&path).unwrap();
    assert_eq!(names(&path), ["graph-0", "graph-of-mine", "graphs.md"]);
    assert!(!path.join("graph-0/10-bucket-collectives.txt").exists());
    // Other files stay, and so do the graphs.
    let before = names(&path.join("graph-0"));
    fs::create_dir(path.join("graph-1")).unwrap();
    fs::write(path.join("graph-1/notes.md"), "mine").unwrap();
    for result in [write_one(&path).map(|_| ()), GraphDump::new(&path).check()] {
        let error = result.unwrap_err();
        let named = path.join("graph-1/notes.md");
        assert!(
            matches!(&error, Error::Dump(DumpError::InTheWay { path, .. }) if *path == named),
            "{error}"
        );
        assert!(
            error.to_string().contains("choose another folder"),
            "{error}"
        );
    }
    assert_eq!(names(&path.join("graph-0")), before);
    assert_eq!(
        names(&path),
        ["graph-0", "graph-1", "graph-of-mine", "graphs.md"]
    );
    #[cfg(unix)]
    {
        fs::remove_dir_all(path.join("graph-1")).unwrap();
        let elsewhere = write_one(&folder.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(&elsewhere, path.join("graph-1")).unwrap();
        assert!(write_one(&path).is_err());
        assert!(
            elsewhere.join("00-trace.txt").exists(),
            "a link is not followed"
        );
    }
}

#[test]
fn an_unwritable_folder_fails_the_step_on_all_ranks() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "mine").unwrap();
    let path = file.join("graphs");
    assert!(matches!(
        GraphDump::new(&path).check(),
        Err(Error::Dump(DumpError::Write { .. }))
    ));
    let _guard = seeded();
    let rank = move |world: ProcessGroup| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).dump(&path);
        let optimizer = AdamWConfig::new().build();
        let mut step = compile(Gpt::new, Gpt::loss, optimizer, mode)?;
        let batch = tokens(0, world.rank(), 1, &Device::flex());
        let error = step.step(1e-2, &batch).unwrap_err();
        match (world.rank(), &error) {
            (0, Error::Dump(DumpError::Write { path: named, .. })) => assert_eq!(*named, path),
            (1, Error::PeerNotReady { rank: 0 }) => {}
            other => panic!("{other:?}"),
        }
        Ok::<_, Error>(())
    };
    launch(LaunchConfig::new(2), rank).unwrap();
    assert_eq!(names(folder.path()), ["file"]);
    assert_eq!(read(file), "mine");
}
