//! Times compiled steps of a GPT on ranks of this process, and prints what they take.
//!
//! `gpt_step [RANKS] [LAYERS] [DIM] [VOCAB] [SEQ] [BATCH] [STEPS]`, batch in rows of all ranks; with
//! `TRACE=file.json`, a Chrome trace of the last step.

use std::error::Error;
use std::time::Instant;

use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Mode, Strategy, compile};

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

fn main() -> Result<(), Box<dyn Error>> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let mut next = |default: usize| numbers.next().unwrap_or(Ok(default));
    let (ranks, layers, dim) = (next(2)?, next(4)?, next(256)?);
    let (vocab, seq, batch, steps) = (next(256)?, next(128)?, next(16)?, next(20)?);
    let heads = (dim / 64).max(1);
    let config = GptConfig {
        layers,
        dim,
        heads,
        vocab,
        seq,
    };
    let trace = std::env::var("TRACE").ok();
    let prefetch = std::env::var("PREFETCH").is_ok();
    let body = move |world: ProcessGroup| -> Result<_, Box<dyn Error + Send + Sync>> {
        let device = Device::flex();
        let mut options = Options::default();
        options.prefetch = Some(prefetch);
        if std::env::var("KEEP").is_ok() {
            options.recompute = None;
        }
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compile(
            move |device: &Device| config.init(device, 1).expect("the sizes are valid"),
            |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
            AdamWConfig::new().build(),
            mode.options(options),
        )?;
        let stream = TokenStream::Synthetic { vocab };
        let batches = Batches { stream, batch, seq };
        let rows = batch / ranks;
        let first = world.rank() * rows;
        let mut times = Vec::new();
        let mut loss = 0.0;
        for index in 0..steps {
            let tokens = batches.rows(index, first..first + rows).to_tensors(&device);
            if index == 2 {
                step.reset_peak();
            }
            let start = Instant::now();
            loss = step.step(1e-3, &tokens)?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let tokens = batches.rows(0, first..first + rows).to_tensors(&device);
        let (_, timeline) = step.step_with_timeline(1e-3, &tokens)?;
        let mut times = times.split_off(steps.min(2));
        times.sort_by(f64::total_cmp);
        let peak = step.memory().peak_bytes();
        let node = step.memory().peak_node().unwrap_or(0);
        let graph = step.graph().map(|graph| {
            (
                graph.nodes().len(),
                graph.nodes().get(node).map(|node| node.name()),
            )
        });
        let live = step.memory().live_bytes();
        Ok((
            times[times.len() / 2],
            peak,
            live,
            loss,
            timeline,
            graph,
            node,
        ))
    };
    let results = launch(LaunchConfig::new(ranks), body)?;
    let (time, peak, live, loss, timeline, graph, node) = &results[0];
    println!(
        "{time:.1} ms a step, peak {:.1} MB, live between steps {:.1} MB, loss {loss:.4}, {graph:?} peak at node {node}",
        *peak as f64 / 1e6,
        *live as f64 / 1e6
    );
    let mut by_name = std::collections::BTreeMap::<String, (f64, usize)>::new();
    for span in timeline.spans() {
        let name = span.name.split(' ').next().unwrap_or_default();
        let entry = by_name.entry(format!("{} {name}", span.phase)).or_default();
        entry.0 += span.duration.as_secs_f64() * 1e3;
        entry.1 += 1;
    }
    let mut by_name: Vec<_> = by_name.into_iter().collect();
    by_name.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    for (name, (time, count)) in by_name.iter().take(25) {
        println!("  {time:8.2} ms {count:5} {name}");
    }
    if let Some(file) = trace {
        let events: Vec<_> = results
            .iter()
            .enumerate()
            .flat_map(|(rank, result)| result.4.chrome_events(rank))
            .collect();
        std::fs::write(file, serde_json::to_string(&events)?)?;
    }
    Ok(())
}
