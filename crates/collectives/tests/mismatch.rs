//! Ranks whose calls differ: each of them gets the same error.

mod ranks;

use burn_fsdp_collectives::{ElementType, Error, FullPart, Part, ProcessGroup, Reduction};
use ranks::{LONG, counting, flat, full, gather, observe, source};

/// Returns the error of every rank when rank 1 of 3 calls `odd` and the others call `usual`.
fn mismatch_error(
    usual: impl Fn(&ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
    odd: impl Fn(&ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
) -> String {
    let seen = observe(3, LONG, move |world| {
        world.barrier("before")?;
        if world.rank() == 1 {
            odd(&world)
        } else {
            usual(&world)
        }
    });
    let messages: Vec<_> = seen
        .into_iter()
        .map(|result| match result {
            Err(error @ Error::Mismatch { .. }) => error.to_string(),
            other => panic!("expected a mismatch, got {other:?}"),
        })
        .collect();
    let (first, rest) = messages.split_first().unwrap();
    // The ledgers may have changed since; the heading is the same.
    let heading = |message: &str| message.lines().next().unwrap().to_owned();
    assert!(
        rest.iter()
            .all(|message| heading(message) == heading(first))
    );
    first.clone()
}

fn gathering(label: &'static str, n: usize) -> impl Fn(&ProcessGroup) -> Result<(), Error> {
    move |world| gather(world, label, n).map(|_| ())
}

#[test]
fn of_kind() {
    let message = mismatch_error(gathering("x", 10), |world| world.barrier("x"));
    assert!(
        message.starts_with(
            "the ranks of group \"world\" differ in operation 1: rank 0 called all_gather \"x\" of 1 \
             part, 40 bytes; rank 1 called barrier \"x\"; make all ranks of a group call the same \
             operations in the same order"
        ),
        "{message}"
    );
    for line in [
        "rank 0: barrier \"before\" (operation 0 of group \"world\"), 0 bytes: done",
        "rank 0: all_gather \"x\" (operation 1 of group \"world\"), 40 bytes: ",
        "rank 1: barrier \"x\" (operation 1 of group \"world\"), 0 bytes: ",
        "rank 2: all_gather \"x\" (operation 1 of group \"world\"), 40 bytes: ",
    ] {
        assert!(message.contains(line), "{line} is not in {message}");
    }
}

#[test]
fn of_label() {
    let message = mismatch_error(gathering("blocks.0", 10), gathering("blocks.1", 10));
    assert!(
        message.contains("rank 0 called all_gather \"blocks.0\""),
        "{message}"
    );
    assert!(
        message.contains("rank 1 called all_gather \"blocks.1\""),
        "{message}"
    );
}

#[test]
fn of_sizes() {
    let message = mismatch_error(gathering("x", 10), gathering("x", 11));
    assert!(
        message.contains("part 0 is f32 10 elements in 3 shards of 4"),
        "{message}"
    );
    assert!(
        message.contains("part 0 is f32 11 elements in 3 shards of 4"),
        "{message}"
    );
}

#[test]
fn of_the_number_of_parts() {
    let message = mismatch_error(gathering("x", 10), |world| {
        let parts = vec![counting(world, 10), counting(world, 3)];
        world
            .join_all_gather("x", vec![], parts)?
            .wait()
            .map(|_| ())
    });
    assert!(message.contains("of 1 part, 40 bytes"), "{message}");
    assert!(message.contains("of 2 parts, 52 bytes"), "{message}");
}

#[test]
fn of_element_type() {
    let message = mismatch_error(gathering("x", 10), |world| {
        let shard = vec![0i32; flat(world, 10).len(world.rank())];
        let part = Part::new(source(&shard), flat(world, 10), ElementType::I32);
        world
            .join_all_gather("x", vec![], vec![part])?
            .wait()
            .map(|_| ())
    });
    assert!(message.contains("part 0 is f32 10"), "{message}");
    assert!(message.contains("part 0 is i32 10"), "{message}");
}

#[test]
fn of_reduction() {
    fn reduce(world: &ProcessGroup, reduction: Reduction) -> Result<(), Error> {
        let into = vec![world.pool().take(20)];
        world
            .all_reduce("x", vec![], reduction, vec![full(world, 5)], into)
            .map(|_| ())
    }
    let message = mismatch_error(
        |world| reduce(world, Reduction::mean(2)),
        |world| reduce(world, Reduction::sum()),
    );
    assert!(
        message.contains("all_reduce \"x\" (sum then x 0.5)"),
        "{message}"
    );
    assert!(message.contains("all_reduce \"x\" (sum)"), "{message}");
}

#[test]
fn of_root() {
    fn cast(world: &ProcessGroup, root: usize) -> Result<(), Error> {
        let is_root = world.rank() == root;
        let absent = FullPart::absent(5, ElementType::F32);
        let part = if is_root { full(world, 5) } else { absent };
        let into = if is_root {
            vec![]
        } else {
            vec![world.pool().take(20)]
        };
        world
            .broadcast("x", vec![], root, vec![part], into)
            .map(|_| ())
    }
    let message = mismatch_error(|world| cast(world, 0), |world| cast(world, 1));
    assert!(message.contains("with root 0"), "{message}");
    assert!(message.contains("with root 1"), "{message}");
}

#[test]
fn of_order() {
    let both = |first: &'static str, second: &'static str| {
        move |world: &ProcessGroup| {
            world.barrier(first)?;
            world.barrier(second)
        }
    };
    let message = mismatch_error(both("a", "b"), both("b", "a"));
    assert!(message.contains("differ in operation 1"), "{message}");
}

#[test]
fn ends_the_world() {
    let seen = observe(2, LONG, |world| {
        let label = if world.rank() == 0 { "a" } else { "b" };
        assert!(matches!(world.barrier(label), Err(Error::Mismatch { .. })));
        world.barrier("after")
    });
    for result in seen {
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("barrier \"after\" (operation 1 of group \"world\") cannot complete")
        );
        assert!(message.contains("differ in operation 0"), "{message}");
    }
}

#[test]
fn a_wrong_length_is_this_ranks_own_error() {
    let seen = observe(2, LONG, |world| {
        let argument = |result: Result<_, Error>| match result {
            Err(Error::Argument {
                argument,
                expected,
                got,
                ..
            }) => (argument, expected, got),
            other => panic!("expected an argument error, got {other:?}"),
        };
        let join = |part| world.join_all_gather("x", vec![], vec![part]).map(|_| ());
        let partition = flat(&world, 10);
        let part = |len| Part::new(source(&vec![0f32; len]), partition, ElementType::F32);
        let (name, expected, got) = argument(join(part(4)));
        assert_eq!(
            [name, expected, got],
            ["parts[0].source", "20 bytes", "16 bytes"]
        );

        let foreign = burn_fsdp_collectives::Partition::flat(10, 3)?;
        let (name, expected, got) = argument(join(Part::absent(foreign, ElementType::F32)));
        assert_eq!(
            [name, expected, got],
            ["parts[0].partition", "in 2 shards", "in 3 shards"]
        );

        let gather = |into| {
            world
                .all_gather("x", vec![], vec![part(5)], into)
                .map(|_| ())
        };
        let (name, ..) = argument(gather(vec![]));
        assert_eq!(name, "into");
        let (name, expected, got) = argument(gather(vec![world.pool().take(44)]));
        assert_eq!([name, expected, got], ["into[0]", "40 bytes", "44 bytes"]);

        let (name, ..) = argument(world.gather("x", vec![], 2, vec![], vec![]).map(|_| ()));
        assert_eq!(name, "root");

        let huge = burn_fsdp_collectives::Partition::flat(usize::MAX / 2, 2)?;
        let (name, ..) = argument(join(Part::absent(huge, ElementType::F32)));
        assert_eq!(name, "parts[0]");

        let odd = FullPart::new(
            burn_fsdp_collectives::Source::new([0u8; 7]),
            ElementType::F32,
        );
        let into = vec![world.pool().take(4)];
        let reduced = world.all_reduce("x", vec![], Reduction::sum(), vec![odd], into);
        let (name, expected, got) = argument(reduced.map(|_| ()));
        assert_eq!(
            [name, expected, got],
            ["parts[0].source", "4 bytes", "7 bytes"]
        );

        // No rank took part in any of these.
        world.barrier("after")?;
        Ok(world.counts().total().operations)
    });
    for result in seen {
        assert_eq!(result.unwrap(), 1);
    }
}
