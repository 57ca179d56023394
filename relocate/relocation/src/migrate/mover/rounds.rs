//! The rounds while everything runs: each sends the disk chunks and pages that may have been
//! written to since the one before.

use super::{
    super::{
        copy::{From, Pass, Reading, Stopped, Ways, pass},
        course::{self, Course},
        link::Link,
        log::Log,
        mirror::How,
        page_stream::{AttemptStreams, PageStream},
        report::{MoveEvent, how_far},
    },
    Mover,
};
use mercury_control::{
    device::Cursor,
    error::{Error, Result},
    exit::Exit,
};
use mercury_migration::{
    protocol::{Patience, source::Event},
    rounds::{Limits, Next, Otherwise},
    wire::{Ledger, PAGE},
};
use std::time::{Duration, Instant};

/// A callback that gets the progress of a pass, and returns false to stop it.
type Watch<'a> = dyn FnMut(&Pass, &mut Link) -> bool + 'a;

/// Interval at which progress is shown.
const INTERVAL: Duration = Duration::from_millis(500);

impl Mover<'_> {
    /// Opens the streams besides the first, when the destination is ready for pages.
    fn open_page_streams(&mut self) -> Result<()> {
        let Self { to, token, attempt, offer, args, patience: Patience { running: patience, .. }, .. } = self;
        let attempt_streams = AttemptStreams { to: *to, token, attempt: *attempt, secret: &offer.secret };
        let control = args.congestion_control.as_deref();
        let open = |stream| PageStream::open(&attempt_streams, stream, *patience, control);
        self.page_streams = (1..offer.streams).map(open).collect::<Result<_>>()?;
        Ok(())
    }

    /// Runs rounds until the machine is to be stopped.
    pub(super) fn copy_rounds(&mut self) -> Event {
        if let Err(error) = self.open_page_streams() {
            return self.last_word().unwrap_or_else(|| self.fail(error));
        }
        let limits = course::limits(self.args);
        let mut course = Course::new(limits);
        self.system.tell(&MoveEvent::Accepted { memory: self.report.memory });
        for number in 0..u64::from(limits.max_rounds) {
            let done = match self.round(number, &limits) {
                Ok(done) => done,
                Err(event) => return event,
            };
            // Settling while everything runs keeps the computation of the digest short at the end.
            self.ledger.settle();
            self.report.rounds = number + 1;
            self.report.pages[0] += done.sent;
            self.report.bytes[0] += done.bytes;
            let outlook = course.after(&done, matches!(self.log, Log::Live), self.mirrored);
            self.system.tell(&MoveEvent::round(number, &done, &outlook));
            let throttle_percent = outlook.throttle_percent();
            match outlook.next {
                Next::Copy { .. } => {
                    if let Err(error) = self.system.hold_back(throttle_percent) {
                        return self.fail(error);
                    }
                }
                Next::Stop { .. } => return Event::StopNow,
                Next::GiveUp { downtime } => return self.fail(course.too_long(downtime)),
            }
        }
        match limits.otherwise {
            Otherwise::Stop => Event::StopNow,
            // `refuse_hopeless` excludes these arguments. A move that was to be given up must not
            // happen.
            Otherwise::GiveUp => {
                let error = Error::new(Exit::Failed, "no downtime could be estimated");
                self.fail(error.hint("leave out --or-give-up, or allow rounds with --rounds"))
            }
        }
    }

    fn round(&mut self, number: u64, limits: &Limits) -> std::result::Result<Pass, Event> {
        if let Some(link) = self.link.as_mut()
            && let Err(error) = link.round(number)
        {
            return Err(self.is_gone(&error.to_string()));
        }
        self.mirror_round(number, limits)?;
        if number == 0 {
            self.log.begin(self.memory);
        }
        let only = if number == 0 { 0 } else { self.log.collect(self.memory) };
        self.pass(From::Now, only, &format!("round {number}"), limits)
    }

    /// Runs a round over the disks. Disks come before memory: sending them takes long, and few
    /// chunks have to be read again at the end.
    fn mirror_round(&mut self, number: u64, limits: &Limits) -> std::result::Result<(), Event> {
        if self.mirror.is_empty() {
            return Ok(());
        }
        if number == 0 {
            self.mirror.watch().map_err(|error| self.fail(error))?;
        } else {
            // File data that is only in memory would otherwise be written at the last moment.
            match self.write_back() {
                Ok(None) => {}
                Ok(Some(event)) => return Err(event),
                Err(error) => return Err(self.fail(error)),
            }
        }
        let done = self.mirror_pass(From::Now, &format!("disks, round {number}"), limits)?;
        self.mirrored = if number == 0 { Duration::ZERO } else { done.took };
        let told = MoveEvent::Mirrored {
            round: number,
            read: done.scanned * PAGE as u64,
            changed: done.sent * PAGE as u64,
            bytes: done.bytes,
            seconds: done.took.as_secs_f64(),
        };
        self.system.tell(&told);
        Ok(())
    }

    /// Runs a pass over disk chunks that may have been written to. At the end, repeats passes until
    /// there are none. Returns an event if one came first.
    pub(super) fn mirror_pass(
        &mut self,
        from: From,
        name: &str,
        limits: &Limits,
    ) -> std::result::Result<Pass, Event> {
        let total = self.mirror.bytes().div_ceil(PAGE as u64);
        let mut mirror = std::mem::take(&mut self.mirror);
        let how = How { level: self.args.level, workers: self.workers, from, limits: *limits };
        let passed = self.watched(from, name, total, |Ways { link, .. }, watch| match from {
            From::Now => mirror.pass(&how, link, watch),
            From::Instant => mirror.finish(&how, link, watch),
        });
        self.mirror = mirror;
        if let Ok(done) = &passed {
            self.report.disk_bytes += done.bytes;
        }
        passed
    }

    /// Runs a pass over memory. Returns an event if one came first.
    pub(super) fn pass(
        &mut self,
        from: From,
        only: u64,
        name: &str,
        limits: &Limits,
    ) -> std::result::Result<Pass, Event> {
        let (memory, kept_proof) = (self.memory, self.proof.take());
        let proof = kept_proof.as_ref();
        let read = |cursor: &mut Cursor, count| match from {
            From::Now => memory.scan(cursor, count, only),
            From::Instant => match proof {
                None => memory.read(cursor, count, only),
                Some(proof) => {
                    let (frames, hashes) = memory.read_hashed(cursor, count, only)?;
                    proof.compare(&frames, &hashes);
                    Ok(frames)
                }
            },
        };
        let reading = Reading { read: &read, from, level: self.args.level, workers: self.workers };
        let total = self.offer.machine.kept_pages();
        let mut ledger = std::mem::replace(&mut self.ledger, Ledger::new(Vec::new()));
        let passed =
            self.watched(from, name, total, |ways, watch| pass(&reading, &mut ledger, limits, ways, watch));
        self.ledger = ledger;
        self.proof = kept_proof;
        passed
    }

    /// Runs a pass over `total` pages, shows its progress, and stops it after Ctrl-C.
    fn watched(
        &mut self,
        from: From,
        name: &str,
        total: u64,
        pass: impl FnOnce(Ways<'_>, &mut Watch<'_>) -> std::result::Result<Pass, Stopped>,
    ) -> std::result::Result<Pass, Event> {
        let Some(mut link) = self.link.take() else { return Err(self.is_gone("there is no connection")) };
        let (begun, mut shown) = (Instant::now(), Instant::now());
        // A program that shows the terminal's lines may stand still at the instant.
        let is_shown = from == From::Now;
        let system = &mut *self.system;
        let was_cancelled = self.is_cancelled;
        let mut watch = |pass: &Pass, link: &mut Link| {
            system.is_alive();
            if is_shown && shown.elapsed() > INTERVAL {
                shown = Instant::now();
                system.show(&how_far(name, pass, total, begun.elapsed().as_secs_f64()));
            }
            (was_cancelled || !system.is_interrupted()) && !link.is_readable()
        };
        let passed = pass(Ways { link: &mut link, page_streams: &self.page_streams }, &mut watch);
        if is_shown {
            self.system.show("");
        }
        match passed {
            Ok(pass) => {
                self.link = Some(link);
                Ok(pass)
            }
            Err(Stopped::Failed(error)) => {
                self.link = Some(link);
                Err(self.fail(error))
            }
            Err(Stopped::Gone(why)) => {
                self.link = Some(link);
                Err(self.last_word().unwrap_or_else(|| self.is_gone(&why)))
            }
            Err(Stopped::Wanted) => {
                self.link = Some(link);
                Err(self.next_event())
            }
        }
    }
}
