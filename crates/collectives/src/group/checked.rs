//! The comparison of the bytes that ranks exchange, around any engine: it announces the checksums of what a rank gives,
//! and compares what it has received. Engines only compare bytes that nothing else sees.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn_fsdp_rendezvous::{
    Check, Checks, Checksums, Control, Difference, Error, GroupId, Held, Label, Meeting, Moment,
    Operation, OperationKind, RankState, Replicas, Seal, Sealed, Signature, checksum,
};
use burn_fsdp_transport::{AlteredPart, Buffer, Findings, Source};
use parking_lot::Mutex;

/// One rank's comparison of a group's bytes.
pub(super) struct Checked {
    id: GroupId,
    /// This rank's number in the group.
    rank: usize,
    state: Arc<RankState>,
    control: Arc<Control>,
    /// The results and values that must be the same on all ranks.
    replicas: Mutex<Replicas>,
}

impl Checked {
    /// Returns the comparison; `None` if ranks do not compare bytes.
    pub(super) fn new(
        (id, rank): (&GroupId, usize),
        state: &Arc<RankState>,
        control: &Arc<Control>,
    ) -> Option<Arc<Self>> {
        (state.check() == Check::Agreement).then(|| {
            Arc::new(Self {
                id: id.clone(),
                rank,
                state: state.clone(),
                control: control.clone(),
                replicas: Mutex::default(),
            })
        })
    }

    fn size(&self) -> usize {
        self.id.members().len()
    }

    /// Returns the checksums for this rank's next claim: of the bytes that it contributes, and of results and values
    /// that it has held since. Compares sealed sources with their seals, except those that an all-gather reads later
    /// (`reads_later`).
    pub(super) fn announce(
        &self,
        signature: &Signature,
        sources: &[Source],
        reads_later: bool,
    ) -> Result<Checks, Error> {
        let trusts_seals = reads_later && signature.kind == OperationKind::AllGather;
        let given = self.of_given(signature, sources, trusts_seals);
        for (part, source) in sources.iter().enumerate() {
            let Some(sealed) = source.note::<Sealed>() else {
                continue;
            };
            // Most operations send all ranks the whole source, so its checksum is already known.
            let to_first = signature.routes(self.rank, 0);
            let is_whole = to_first.get(part).map(|route| &route.given) == Some(&(0..source.len()));
            if !(is_whole && Some(given[part]) == sealed.seal.checksums().whole()) {
                let what = || sealed.what.as_str().to_owned();
                self.check_seal(&sealed.seal, source.as_bytes(), what)?;
            }
        }
        Ok(Checks {
            given,
            results: self.replicas.lock().take_untold(),
        })
    }

    /// Returns the checksums of the bytes that this rank sends to each rank of the group. If `trusts_seals` is true, the
    /// checksum of a source that is sent whole comes from its seal. Otherwise all bytes are read.
    fn of_given(&self, signature: &Signature, sources: &[Source], trusts_seals: bool) -> Vec<u64> {
        // Most operations send all ranks the same bytes, which are read once.
        let mut last: Vec<Option<(Range<usize>, u64)>> = vec![None; sources.len()];
        let mut given = Vec::with_capacity(self.size() * sources.len());
        for to in 0..self.size() {
            let routes = signature.routes(self.rank, to);
            for (part, source) in sources.iter().enumerate() {
                let range = routes.get(part).map_or(0..0, |route| route.given.clone());
                let known = last[part].take().filter(|(known, _)| *known == range);
                let (range, checksum) = known.unwrap_or_else(|| {
                    let is_whole = range == (0..source.len());
                    let sealed = source.note::<Sealed>();
                    let sealed = sealed.filter(|_| trusts_seals && is_whole);
                    let told = sealed.and_then(|sealed| sealed.seal.checksums().whole());
                    let read = || checksum(&source.as_bytes()[range.clone()]);
                    let told = told.unwrap_or_else(read);
                    (range, told)
                });
                given.push(checksum);
                last[part] = Some((range, checksum));
            }
        }
        given
    }

    /// Compares the bytes that an operation has left in `buffers` with the checksums that the other ranks have
    /// announced, unless the engine has. Returns the seals of the buffers.
    pub(super) fn compare(
        &self,
        (operation, meeting): (&Operation, &dyn Meeting),
        findings: Findings,
        buffers: &[Buffer],
    ) -> Result<Vec<Seal>, Error> {
        let size = self.size();
        let own = meeting.claim(self.rank);
        let signature = &own.signature;
        self.state.tell_watcher(operation, &own.checks.given, || {
            let got = buffers.iter().map(|buffer| checksum(buffer.as_ref()));
            got.collect()
        });
        let altered = match signature.reduction {
            None if !findings.has_compared_placed => {
                (0..size).find_map(|from| self.first_misplaced(from, meeting, buffers))
            }
            _ => findings.altered,
        };
        if let Some(altered) = altered {
            return Err(self.altered(operation, altered));
        }
        let checksums = if findings.results.len() == buffers.len() {
            findings.results
        } else {
            self.checksums(meeting, buffers)
        };
        let mut replicas = self.replicas.lock();
        if signature.kind == OperationKind::AllReduce && !buffers.is_empty() {
            replicas.hold(operation, size, &checksums);
        }
        let difference =
            |from: usize| replicas.hear(from, size, &meeting.claim(from).checks.results);
        match (0..size).map(difference).fold(None, Option::or) {
            None => Ok(self.state.seals(checksums)),
            Some(difference) => Err(self.disagreement(operation, difference)),
        }
    }

    /// Compares the contents of the buffers with the checksums that rank `from` has announced. Returns the first part
    /// that differs.
    fn first_misplaced(
        &self,
        from: usize,
        meeting: &dyn Meeting,
        buffers: &[Buffer],
    ) -> Option<AlteredPart> {
        let routes = meeting.claim(self.rank).signature.routes(from, self.rank);
        if buffers.is_empty() || routes.is_empty() {
            return None;
        }
        let placed = buffers.iter().zip(routes);
        let placed = placed.map(|(buffer, route)| &buffer.as_ref()[route.placed]);
        let checks = &meeting.claim(from).checks;
        let part = checks.first_altered(self.rank, placed)?;
        Some(AlteredPart::on_its_way(from, part))
    }

    /// Returns the checksums of each buffer. For concatenated and compared bytes they are derived from the announced
    /// checksums.
    fn checksums(&self, meeting: &dyn Meeting, buffers: &[Buffer]) -> Vec<Checksums> {
        let signature = &meeting.claim(self.rank).signature;
        let routes = |from| signature.routes(from, self.rank);
        let routes: Vec<_> = (0..self.size()).map(routes).collect();
        let joined = |part: usize| {
            let told = routes.iter().enumerate().filter_map(|(from, routes)| {
                let len = routes.get(part)?.placed.len();
                Some((&meeting.claim(from).checks, len))
            });
            Checks::joined(told, (self.rank, buffers.len()), part)
        };
        let checksums = |(part, buffer): (usize, &Buffer)| {
            let joined = signature.reduction.is_none().then(|| joined(part));
            let read = || Checksums::of(buffer.as_ref());
            joined.flatten().unwrap_or_else(read)
        };
        buffers.iter().enumerate().map(checksums).collect()
    }

    /// Stores the checksum of a value that must be the same on all ranks; the next operation announces it.
    pub(super) fn hold_value(&self, told: (u64, u64), what: Label) {
        self.replicas.lock().hold_value(told, self.size(), what);
    }

    /// Returns a seal of bytes with these checksums and the current moment.
    pub(super) fn sealed(&self, checksums: Checksums) -> Seal {
        Seal::new(checksums, self.state.moment())
    }

    /// Checks that bytes match their seal, and ends the group's failure domain if not.
    pub(super) fn check_seal(
        &self,
        seal: &Seal,
        bytes: &[u8],
        what: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if seal.is_of(bytes) {
            return Ok(());
        }
        let rank = self.state.world_rank();
        let error = Error::AlteredAtRest {
            what: what(),
            rank,
            written: Box::new(seal.written().clone()),
            found: Box::new(self.state.moment()),
            ledger: self.control.report(),
        };
        Err(self.control.end_with(rank, error))
    }

    fn altered(&self, operation: &Operation, altered: AlteredPart) -> Error {
        let AlteredPart { from, part, source } = altered;
        let (peer, ledger) = (self.id.members()[from], self.control.report());
        let (rank, step) = (self.state.world_rank(), self.state.step());
        let sealed = source.as_ref().and_then(|source| {
            let sealed = source.note::<Sealed>()?;
            (!sealed.seal.is_of(source.as_bytes())).then_some(sealed)
        });
        let error = match sealed {
            Some(sealed) => Error::AlteredAtRest {
                what: sealed.what.as_str().to_owned(),
                rank: peer,
                written: Box::new(sealed.seal.written().clone()),
                found: Box::new(Moment::new(step, Some(operation.clone()))),
                ledger,
            },
            None => Error::Altered {
                operation: Box::new(operation.clone()),
                step,
                rank,
                peer,
                part,
                ledger,
            },
        };
        self.control.end_with(rank, error)
    }

    fn disagreement(&self, operation: &Operation, difference: Difference) -> Error {
        let ranks = difference.ranks.into_iter();
        let ranks = ranks.map(|rank| self.id.members()[rank]).collect();
        let (step, ledger) = (self.state.step(), self.control.report());
        let error = match difference.held {
            Some(Held::Value(what)) => Error::Diverged {
                what: what.as_str().to_owned(),
                step,
                ranks,
                ledger,
            },
            held => Error::Disagreement {
                operation: Box::new(match held {
                    Some(Held::Result(operation)) => operation,
                    _ => operation.clone(),
                }),
                step,
                ranks,
                ledger,
            },
        };
        self.control.end_with(self.state.world_rank(), error)
    }
}

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").finish_non_exhaustive()
    }
}
