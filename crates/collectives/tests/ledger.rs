//! Counts and records of the ranks' operations.

mod ranks;

use std::fmt;
use std::sync::{Arc, Mutex};

use burn_fsdp_collectives::{
    EntryState, Ledger, OperationKind, Part, ProcessGroup, Reduction, Source, Tally,
};
use ranks::{counting, flat, floats, full, gather, run, source};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

#[test]
fn counts_are_exact_in_operations_and_bytes() {
    let counts = run(3, |world| {
        gather(&world, "x", 10)?;
        let before = world.counts();
        gather(&world, "x", 7)?;
        world
            .join_all_gather("x", vec![], vec![counting(&world, 2)])?
            .discard();
        let element = burn_fsdp_collectives::ElementType::F32;
        let partition = flat(&world, 5);
        let part = Part::new(source(&floats(world.rank(), 5)), partition, element);
        let into = vec![world.pool().take(partition.len(world.rank()) * 4)];
        let _ = world.reduce_scatter("y", vec![], Reduction::sum(), vec![part], into)?;
        let into = [12, 16].map(|len| world.pool().take(len)).into();
        let parts = vec![full(&world, 3), full(&world, 4)];
        let _ = world.all_reduce("z", vec![], Reduction::sum(), parts, into)?;
        world.exchange("say", vec![0; 6])?;
        world.barrier("end")?;
        Ok((before, world.counts().since(&before)))
    });
    for (before, counts) in counts {
        let tally = |operations, bytes| Tally { operations, bytes };
        assert_eq!(before.of(OperationKind::AllGather), tally(1, 40));
        assert_eq!(before.total(), tally(1, 40));
        assert_eq!(counts.of(OperationKind::AllGather), tally(2, 28 + 8));
        assert_eq!(counts.of(OperationKind::ReduceScatter), tally(1, 20));
        assert_eq!(counts.of(OperationKind::AllReduce), tally(1, 28));
        assert_eq!(counts.of(OperationKind::Exchange), tally(1, 6));
        assert_eq!(counts.of(OperationKind::Barrier), tally(1, 0));
        assert_eq!(counts.of(OperationKind::Scatter), tally(0, 0));
        assert_eq!((before + counts).total(), tally(7, 40 + 36 + 20 + 28 + 6));
        assert_eq!(
            counts.to_string(),
            "2 all_gather (36 bytes), 1 reduce_scatter (20 bytes), 1 all_reduce (28 bytes), \
             1 barrier, 1 exchange (6 bytes)"
        );
    }
    assert_eq!(ProcessGroup::solo().counts().to_string(), "none");
}

#[test]
fn the_ledger_records_the_fate_of_operations() {
    let world = ProcessGroup::solo();
    gather(&world, "done", 2).unwrap();
    world.start_barrier("dropped").unwrap().discard();
    let pending = world.start_barrier("open").unwrap();
    let text = world.ledger().to_string();
    assert_eq!(
        text,
        "all_gather \"done\" (operation 0 of group \"world\"), 8 bytes: done\n\
         barrier \"dropped\" (operation 1 of group \"world\"), 0 bytes: discarded\n\
         barrier \"open\" (operation 2 of group \"world\"), 0 bytes: started\n"
    );
    pending.wait().unwrap();
    assert_eq!(
        world.ledger().entries().next_back().unwrap().state,
        EntryState::Done
    );
}

#[test]
fn the_ledger_keeps_the_last_operations() {
    let world = ProcessGroup::solo();
    let oldest = world.start_barrier("oldest").unwrap();
    for i in 0..40 {
        world.barrier(format!("barrier {i}")).unwrap();
    }
    // No longer in the ledger: no entry is settled, and no other entry is changed instead.
    oldest.discard();
    let ledger = world.ledger();
    assert_eq!(
        (ledger.entries().len(), ledger.num_recorded()),
        (Ledger::CAPACITY, 41)
    );
    assert_eq!(
        ledger.entries().next().unwrap().operation.label.as_str(),
        "barrier 8"
    );
    assert!(
        ledger
            .entries()
            .all(|entry| entry.state == EntryState::Done)
    );
}

#[test]
fn groups_of_a_rank_share_its_ledger() {
    let lines = run(2, |world| {
        let own = world.split(world.rank(), 0, "own")?;
        own.barrier("alone")?;
        let part = Part::absent(flat(&own, 0), burn_fsdp_collectives::ElementType::U8);
        own.join_all_gather("nothing", vec![], vec![part])?.wait()?;
        assert!(Source::empty().is_empty());
        Ok(world
            .ledger()
            .entries()
            .map(|entry| entry.operation.to_string())
            .collect::<Vec<_>>())
    });
    let expected = [
        "exchange \"split into own\" (operation 0 of group \"world\")",
        "barrier \"alone\" (operation 0 of group \"own\")",
        "all_gather \"nothing\" (operation 1 of group \"own\")",
    ];
    assert_eq!(lines, [expected, expected]);
}

#[test]
fn a_recording_has_the_spans_of_each_operation_in_order() {
    let recorded = run(2, |world| {
        gather(&world, "before", 3)?;
        assert_eq!(world.end_recording(), [], "nobody records");
        let live = world.pool().clone();
        world.start_recording(move || live.live_bytes());
        gather(&world, "x", 10)?;
        world.barrier("end")?;
        let spans = world.end_recording();
        gather(&world, "after", 3)?;
        assert_eq!(world.end_recording(), [], "nobody records any more");
        Ok(spans)
    });
    for spans in recorded {
        let labels: Vec<_> = spans
            .iter()
            .map(|span| format!("{} {}", span.stage, span.operation.label.as_str()))
            .collect();
        assert_eq!(labels, ["start x", "wait x", "start end", "wait end"]);
        assert_eq!(spans[0].bytes, 40);
        // The result arrives during the wait.
        assert!(spans[1].sample >= 40, "{}", spans[1].sample);
        for pair in spans.windows(2) {
            assert!(pair[0].start <= pair[0].end && pair[0].end <= pair[1].start);
        }
    }
}

/// The fields of the events of one thread.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Visit for Heard {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if let Ok(mut heard) = self.0.lock() {
            heard.push(format!("{} {value:?}", field.name()));
        }
    }
}

impl Subscriber for Heard {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::TRACE && metadata.target().starts_with("burn_fsdp_collectives")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn the_start_of_each_operation_is_traced_with_its_label() {
    let heard = run(2, |world| {
        let heard = Heard::default();
        let told = tracing::subscriber::set_default(heard.clone());
        gather(&world, "blocks.3 unshard", 10)?;
        world.barrier("end")?;
        drop(told);
        gather(&world, "not heard", 1)?;
        let heard = heard.0.lock().map(|heard| heard.clone());
        Ok(heard.unwrap_or_default())
    });
    for (rank, heard) in heard.into_iter().enumerate() {
        let started = [
            "all_gather \"blocks.3 unshard\" (operation 0 of group \"world\")",
            "barrier \"end\" (operation 1 of group \"world\")",
        ];
        let started = started.map(|operation| format!("operation {operation}"));
        let operations: Vec<_> = heard
            .iter()
            .filter(|field| field.starts_with("operation "))
            .collect();
        assert_eq!(operations, started.iter().collect::<Vec<_>>());
        assert!(heard.contains(&"bytes 40".to_owned()), "{heard:?}");
        let ranks = heard
            .iter()
            .filter(|field| **field == format!("rank {rank}"));
        assert_eq!(ranks.count(), 2, "{heard:?}");
    }
}
