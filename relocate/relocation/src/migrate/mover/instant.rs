//! The standstill: the instant, and the pages that have changed since they were sent.

use super::{
    super::{
        copy::{From, Proof},
        course,
        report::{After, MoveEvent},
        system,
    },
    Mover, Step,
};
use mercury_abi::ioctl::MERCURY_READ_USED;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{protocol::source::Event, rounds::Limits};
use mercury_quiesce::hardware;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Time for writing file data back to disks and servers, before anything stands still.
const WRITE_PATIENCE: Duration = Duration::from_secs(300);
/// Interval of signs of life; the other end takes longer silence for an end.
const SIGN_OF_LIFE: Duration = Duration::from_secs(20);

impl Mover<'_> {
    /// Sends the disk chunks that were written to until file systems were held still. Nothing
    /// writes to the disks any more.
    fn mirror_the_rest(&mut self) -> std::result::Result<(), Event> {
        if self.mirror.is_empty() {
            return Ok(());
        }
        if self.report.rounds == 0 {
            self.mirror.watch().map_err(|error| self.fail(error))?;
        }
        let limits = Limits { max_bytes_per_second: None, ..course::limits(self.args) };
        self.mirror_pass(From::Instant, "the rest of the disks", &limits).map(drop)
    }

    /// Reads the frames that were not in the dirty log as well, and counts those that should have
    /// been in it.
    fn verify_log(&mut self, limits: &Limits) -> std::result::Result<(), Event> {
        let rest = self.pass(From::Instant, MERCURY_READ_USED, "the rest, to compare", limits)?;
        self.report.missed = Some(rest.changed);
        self.operator.tell(&format!(
            "{} pages were not in the dirty log, of which {} should have been",
            rest.scanned, rest.changed
        ));
        Ok(())
    }

    /// Proves that the frames that were read are those of the instant; otherwise the machine does
    /// not move.
    fn prove(&mut self) -> Result<()> {
        let Some((compared, wrong)) = self.proof.as_ref().map(Proof::found) else { return Ok(()) };
        let said = format!(
            "{compared} pages were compared with the hypervisor's hashes of the instant, of which {wrong} \
             differ"
        );
        self.operator.tell(&said);
        if wrong == 0 {
            Ok(())
        } else {
            Err(Error::new(Exit::Failed, said).hint("report this as a bug; the machine runs on"))
        }
    }

    /// Writes file data back to disk, so that little is left when everything stands still. Returns
    /// an event if one came first. Only this command waits for a disk or a server that does not
    /// answer, and not for ever.
    pub(super) fn write_back(&mut self) -> Result<Option<Event>> {
        let written = self.system.begin_sync();
        let (end, mut said) = (Instant::now() + WRITE_PATIENCE, Instant::now());
        let mut rounds = self.report.rounds..;
        while !written.is_finished() {
            self.system.is_alive();
            if self.is_wanted_to_stop() {
                return Ok(Some(Event::Cancel));
            }
            let Some(link) = self.link.as_mut() else { return Ok(Some(Event::Disconnected)) };
            if link.is_readable() {
                return Ok(Some(self.next_event()));
            }
            if said.elapsed() > SIGN_OF_LIFE
                && let Some(number) = rounds.next()
            {
                said = Instant::now();
                if let Err(error) = link.round(number).and_then(|()| link.flush()) {
                    return Ok(Some(self.is_gone(&error.to_string())));
                }
            }
            if Instant::now() > end {
                let text = "file data cannot be written back to disks or servers";
                return Err(Error::new(Exit::Failed, text).hint(
                    "find the disk or server that does not answer: a process in state D waits for \
                        it (ps, /proc/PID/stack)",
                ));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(None)
    }

    /// Holds everything still, takes the instant, and sends the pages that have changed since they
    /// were sent.
    pub(super) fn stop_and_copy(&mut self) -> Result<Step> {
        self.system.tell(&MoveEvent::Stops);
        if let Some(event) = self.write_back()? {
            return Ok(Step::Event(event));
        }
        let begun = Instant::now();
        self.stopped = Some(begun);
        self.system.hold_still()?;
        if let Err(event) = self.mirror_the_rest() {
            return Ok(Step::Event(event));
        }
        self.offer.machine.file_systems = self.system.file_systems();
        // The fence comes last, because the calls before read files, which may be on a server.
        self.system.fence_off(self.to)?;
        if self.system.take_instant()? == system::After::Arrived {
            return Ok(Step::Arrived);
        }
        hardware::note_instant(&mut self.offer.machine);
        self.mirror.is_still()?;
        for (disk, digest) in self.offer.disks.iter_mut().zip(self.mirror.digests(self.attempt)) {
            disk.digest = digest;
        }
        let quiesce_us = begun.elapsed().as_secs_f64() * 1e6;
        self.pause("Instant");
        if let Some(link) = &self.link {
            link.be_patient(self.patience.frozen);
        }
        self.page_streams.iter().for_each(|page_stream| page_stream.be_patient(self.patience.frozen));
        let last = Instant::now();
        let limits = Limits { max_bytes_per_second: None, ..course::limits(self.args) };
        let only = self.log.collect(self.memory);
        let found_by = self.log.found_by();
        let done = match self.pass(From::Instant, only, "the last pages", &limits) {
            Ok(done) => done,
            Err(event) => return Ok(Step::Event(event)),
        };
        let last_took = last.elapsed();
        if (self.args.verify_log || self.proof.is_some())
            && only != 0
            && let Err(event) = self.verify_log(&limits)
        {
            return Ok(Step::Event(event));
        }
        self.prove()?;
        // Only the end of the snapshot proves that all frames were those of the instant.
        self.system.end_instant()?;
        if !self.ledger.is_complete() {
            return Err(Error::new(Exit::Failed, "not all of memory could be read").hint("try again"));
        }
        self.streamed = Some(Instant::now());
        let last_us = last_took.as_secs_f64() * 1e6;
        self.report.after =
            Some(After { found_by, scanned: done.scanned, quiesce_us, last_us, ..After::default() });
        self.report.pages[1] = done.sent;
        self.report.bytes[1] = done.bytes;
        Ok(Step::Event(Event::Streamed(self.ledger.digest(self.attempt))))
    }
}
