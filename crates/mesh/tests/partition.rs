//! Tests of partitions: every element once, in order, in shards of the stated sizes.

use burn_fsdp_mesh::{Error, Partition, Placement, ReduceOp, transfers};
use proptest::prelude::*;

fn lens(partition: &Partition) -> Vec<usize> {
    partition.ranges().map(|range| range.len()).collect()
}

#[test]
fn last_shards_are_shorter_or_empty() {
    assert_eq!(lens(&Partition::flat(7, 4).unwrap()), [2, 2, 2, 1]);
    assert_eq!(lens(&Partition::flat(5, 4).unwrap()), [2, 2, 1, 0]);
    assert_eq!(lens(&Partition::flat(2, 4).unwrap()), [1, 1, 0, 0]);
    assert_eq!(lens(&Partition::flat(0, 3).unwrap()), [0, 0, 0]);
    assert_eq!(lens(&Partition::flat(5, 1).unwrap()), [5]);
}

#[test]
fn blocks_are_kept_whole() {
    let lens = |n, multiple, shards| lens(&Partition::multiples(n, multiple, shards).unwrap());
    assert_eq!(lens(7, 2, 3), [4, 3, 0]);
    assert_eq!(lens(1000, 256, 3), [512, 488, 0]);
    assert_eq!(lens(1000, 256, 2), [512, 488]);
    assert_eq!(lens(5, 256, 2), [5, 0]);
    assert_eq!(lens(0, 256, 2), [0, 0]);
    // 0 is 1, which is none.
    assert_eq!(Partition::multiples(7, 0, 3), Partition::flat(7, 3));
    let partition = Partition::multiples(1000, 256, 3).unwrap();
    assert_eq!(
        partition.to_string(),
        "1000 elements in 3 shards of 512 (multiples of 256)"
    );
    assert!(Partition::multiples(usize::MAX, 256, 1).is_err());
}

#[test]
fn rows_are_kept_whole() {
    let partition = Partition::rows(&[7, 3, 5], 4).unwrap();
    assert_eq!(lens(&partition), [30, 30, 30, 15]);
    assert_eq!(partition.padded_len(), 120);
    assert_eq!(partition.padding(3), 15);
    assert_eq!(
        partition.to_string(),
        "105 elements in 4 shards of 30 (rows of 15)"
    );
    assert_eq!(lens(&Partition::rows(&[], 2).unwrap()), [1, 0]);
    assert_eq!(lens(&Partition::rows(&[0, 4], 2).unwrap()), [0, 0]);
    assert_eq!(lens(&Partition::rows(&[4, 0], 2).unwrap()), [0, 0]);
    assert!(Partition::rows(&[4, 0], 2).unwrap().is_empty());
}

#[test]
fn refuses_invalid_partitions() {
    assert_eq!(
        Partition::flat(5, 0),
        Err(Error::NoShards { num_elements: 5 })
    );
    assert_eq!(
        Partition::rows(&[5, 2], 0),
        Err(Error::NoShards { num_elements: 10 })
    );
    let shape = [usize::MAX, 2];
    let error = Partition::rows(&shape, 2).unwrap_err();
    assert_eq!(
        error,
        Error::TooManyElements {
            shape: shape.to_vec(),
            num_shards: 2
        }
    );
    assert!(Partition::rows(&[1, usize::MAX, usize::MAX], 1).is_err());
    assert!(
        Partition::rows(&[1, usize::MAX, usize::MAX, 0], 1)
            .unwrap()
            .is_empty()
    );
    assert!(
        Partition::flat(usize::MAX, 2).is_err(),
        "its padding overflows"
    );
    assert_eq!(
        Partition::flat(usize::MAX, 1).unwrap().range(0),
        0..usize::MAX
    );
}

#[test]
#[should_panic(expected = "shard 2 is not in a partition of 2 shards")]
fn a_shard_beyond_the_last_is_a_bug() {
    let _ = Partition::flat(5, 2).unwrap().range(2);
}

#[test]
#[should_panic(expected = "element 5 is not in a tensor of 5 elements")]
fn an_element_beyond_the_last_is_a_bug() {
    let _ = Partition::flat(5, 2).unwrap().owner(5);
}

#[test]
fn resharding_lists_the_overlaps() {
    let (from, to) = (
        Partition::flat(10, 2).unwrap(),
        Partition::flat(10, 3).unwrap(),
    );
    let pieces: Vec<_> = transfers(&from, &to)
        .unwrap()
        .into_iter()
        .map(|piece| (piece.from_shard, piece.to_shard, piece.range))
        .collect();
    assert_eq!(
        pieces,
        [(0, 0, 0..4), (0, 1, 4..5), (1, 1, 5..8), (1, 2, 8..10)]
    );
    let other = Partition::flat(11, 3).unwrap();
    assert_eq!(
        transfers(&from, &other),
        Err(Error::DifferentTensors { from: 10, to: 11 })
    );
}

#[test]
fn deserialization_validates() {
    let partition = Partition::rows(&[7, 15], 4).unwrap();
    let text = serde_json::to_string(&partition).unwrap();
    assert_eq!(serde_json::from_str::<Partition>(&text).unwrap(), partition);
    let none = r#"{"num_rows":7,"row_len":15,"num_shards":0}"#;
    assert!(serde_json::from_str::<Partition>(none).is_err());
    let none = r#"{"num_rows":7,"row_len":1,"num_shards":2,"multiple":0}"#;
    assert!(serde_json::from_str::<Partition>(none).is_err());
}

#[test]
fn an_owner_is_one_of_the_shards() {
    let error = Partition::one_owner(5, 3, 3).expect_err("there are shards 0 to 2");
    let message = error.to_string();
    assert!(
        message.contains("shard 3") && message.contains("0 to 2"),
        "{message}"
    );
    assert_eq!(
        Partition::one_owner(5, 0, 0),
        Err(Error::NoShards { num_elements: 5 })
    );
    let partition = Partition::one_owner(5, 3, 1).unwrap();
    assert_eq!(partition.to_string(), "5 elements in shard 1 of 3");
    // A tensor with one owner differs from a tensor that happens to be on one rank.
    assert_ne!(Partition::one_owner(5, 1, 0), Partition::flat(5, 1));
    assert_eq!(Partition::flat(5, 1).unwrap().sole_owner(), None);
}

#[test]
fn placements_print_as_they_are_written() {
    assert_eq!(Placement::Replicate.to_string(), "replicate");
    assert_eq!(Placement::Shard(1).to_string(), "shard(1)");
    assert_eq!(
        Placement::Partial(ReduceOp::Mean).to_string(),
        "partial(mean)"
    );
}

fn partitions() -> impl Strategy<Value = Partition> {
    let flat = (0usize..200, 1usize..9).prop_map(|(n, shards)| Partition::flat(n, shards));
    let rows = (prop::collection::vec(0usize..7, 0..4), 1usize..9)
        .prop_map(|(shape, shards)| Partition::rows(&shape, shards));
    let multiples = (0usize..200, 1usize..40, 1usize..9)
        .prop_map(|(n, multiple, shards)| Partition::multiples(n, multiple, shards));
    prop_oneof![flat, rows, multiples].prop_map(Result::unwrap)
}

fn with_one_owner() -> impl Strategy<Value = Partition> {
    let owned = (0usize..200, 1usize..9).prop_flat_map(|(n, shards)| {
        (0..shards).prop_map(move |owner| Partition::one_owner(n, shards, owner))
    });
    owned.prop_map(Result::unwrap)
}

proptest! {
    #[test]
    fn every_element_is_in_one_shard_in_order(partition in prop_oneof![partitions(), with_one_owner()]) {
        let mut next = 0;
        for range in partition.ranges() {
            prop_assert_eq!(range.start, next);
            next = range.end;
        }
        prop_assert_eq!(next, partition.num_elements());
        prop_assert_eq!(partition.ranges().len(), partition.num_shards());
    }

    #[test]
    fn shards_are_full_until_the_rows_run_out(partition in partitions()) {
        let chunk = partition.chunk_len();
        let lens = lens(&partition);
        prop_assert_eq!(lens.iter().max(), Some(&chunk));
        prop_assert!(lens.is_sorted_by(|a, b| a >= b));
        let cut = lens.iter().filter(|len| (1..chunk).contains(*len)).count();
        prop_assert!(cut <= 1, "{lens:?}");
        for (shard, len) in lens.iter().enumerate() {
            prop_assert_eq!(len + partition.padding(shard), chunk);
            prop_assert!(partition.row_len() == 0 || len % partition.row_len() == 0);
        }
        for range in partition.ranges() {
            let is_end = range.end == partition.num_elements();
            let multiple = partition.multiple() * partition.row_len();
            prop_assert!(is_end || range.end.is_multiple_of(multiple));
        }
        let text = serde_json::to_string(&partition).unwrap();
        prop_assert_eq!(serde_json::from_str::<Partition>(&text).unwrap(), partition);
        prop_assert_eq!(partition.padded_len(), chunk * partition.num_shards());
    }

    #[test]
    fn the_owner_holds_the_element(partition in prop_oneof![partitions(), with_one_owner()]) {
        for element in 0..partition.num_elements() {
            prop_assert!(partition.range(partition.owner(element)).contains(&element));
        }
        let non_empty: usize = partition.non_empty().map(|(_, range)| range.len()).sum();
        prop_assert_eq!(non_empty, partition.num_elements());
    }

    #[test]
    fn one_owner_has_all_elements(partition in with_one_owner()) {
        let owner = partition.sole_owner().expect("it has one");
        for shard in 0..partition.num_shards() {
            let expected = if shard == owner { partition.num_elements() } else { 0 };
            prop_assert_eq!(partition.len(shard), expected);
            prop_assert_eq!(partition.padding(shard), partition.chunk_len() - expected);
        }
        let text = serde_json::to_string(&partition).unwrap();
        prop_assert_eq!(serde_json::from_str::<Partition>(&text).unwrap(), partition);
    }

    #[test]
    fn transfers_move_every_element_from_its_owner_to_its_owner(
        n in 0usize..200, from in 1usize..9, to in 1usize..9,
    ) {
        let (from, to) = (Partition::flat(n, from).unwrap(), Partition::flat(n, to).unwrap());
        let pieces = transfers(&from, &to).unwrap();
        prop_assert!(n == 0 || pieces.len() < from.num_shards() + to.num_shards());
        let mut next = 0;
        for piece in pieces {
            prop_assert!(!piece.range.is_empty());
            prop_assert_eq!(piece.range.start, next);
            next = piece.range.end;
            for element in piece.range {
                prop_assert_eq!(from.owner(element), piece.from_shard);
                prop_assert_eq!(to.owner(element), piece.to_shard);
            }
        }
        prop_assert_eq!(next, n);
    }
}
