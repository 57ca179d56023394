//! The properties that must hold in every state.

use super::{
    network::{Network, Packet},
    world::{Power, Step, World},
};
use crate::protocol::{
    Verdict,
    destination::{self, Phase},
    source::{self, Applications, Asked, State},
};

pub type Checked = Result<(), String>;

/// Checks that nothing bad happens, the gravest first.
pub fn is_safe(world: &World) -> Checked {
    never_two(world)?;
    only_what_was_verified(world)?;
    never_given_up_for_nothing(world)?;
    as_if_nothing_had_been_tried(world)?;
    never_thrown_away_without_a_word(world)?;
    never_none_without_a_word(world)
}

/// Checks that the move also completes as soon as nothing fails any more.
pub fn is_right(world: &World) -> Checked {
    is_safe(world)?;
    comes_to_an_end(world)
}

fn ensure(holds: bool, what: &str) -> Checked {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// The machine never runs twice: not at once, and not one copy after the other without an
/// operator's decision.
fn never_two(world: &World) -> Checked {
    ensure(!(world.source_runs() && world.destination.runs), "two machines run")?;
    ensure(!world.ghosts.resumed_after, "the source went on by itself after the destination had run")
}

/// The arrival that runs is the source at its instant, unchanged since.
fn only_what_was_verified(world: &World) -> Checked {
    let same = world.ghosts.executed_times.is_none_or(|(arrived, source)| arrived == source);
    ensure(same, "what ran at the destination is not what the source is")
}

fn never_given_up_for_nothing(world: &World) -> Checked {
    let source = &world.source.machine;
    let gone = source.state == State::GivenUp;
    let reason = world.ghosts.executed == Some(source.attempt) || world.ghosts.operator_abandoned;
    ensure(!gone || reason, "the source is given up, and the destination never ran")
}

/// Before the verdict any failure lets the source go on at once, with nothing on its disk.
fn as_if_nothing_had_been_tried(world: &World) -> Checked {
    use source::Event;
    let state = world.source.machine.state;
    let is_before = matches!(state, State::Offering | State::Copying | State::Stopping | State::Asking(_));
    if world.source.power != Power::On || !is_before {
        return Ok(());
    }
    for event in [Event::Disconnected, Event::TimedOut, Event::Failed, Event::Cancel] {
        let mut after = world.clone();
        after.take(Step::Source(event));
        let what = format!("the source does not go on after {event:?} in {state:?}");
        ensure(after.source_runs() && after.source.pending == world.source.pending, &what)?;
    }
    Ok(())
}

/// A complete arrival may be the only copy. When time is up an operator is told, and the arrival is
/// kept until time is up again.
fn never_thrown_away_without_a_word(world: &World) -> Checked {
    if !matches!(world.destination.machine.phase(), Some(Phase::Ready(_, Asked::No))) {
        return Ok(());
    }
    let mut after = world.clone();
    after.destination.told = false;
    after.take(Step::Destination(destination::Event::TimedOut));
    let is_kept = after.destination.machine.may_adopt();
    ensure(after.destination.told && is_kept, "an arrival that is whole goes, and no operator is told")
}

/// Where nothing runs, an operator is told what to do, at the latest when time is up, even in
/// lasting silence.
fn never_none_without_a_word(world: &World) -> Checked {
    let none_runs = |world: &World| !world.source_runs() && !world.destination.runs;
    let is_off = matches!(world.source.power, Power::Off | Power::KeptOff);
    if !none_runs(world) || is_off || world.source.machine.applications() == Applications::GivenUp {
        return Ok(());
    }
    let mut alone = world.clone();
    if alone.source.power == Power::NoSender {
        alone.take(Step::SenderStarts);
    }
    for _ in 0..3 {
        alone.take(Step::Source(source::Event::TimedOut));
    }
    let told = alone.source.told && alone.source.machine.may_decide();
    ensure(!none_runs(&alone) || told, "nothing runs, and no operator is told")
}

/// From here on nothing fails any more, but everything under way is lost. In the end one machine
/// runs, or the only end that could know has lost it and an operator is asked.
fn comes_to_an_end(world: &World) -> Checked {
    let mut world = world.clone();
    world.to_source.clear();
    world.to_destination.clear();
    for _ in 0..40 {
        if is_over(&world) {
            return Ok(());
        }
        let before = world.clone();
        go_well(&mut world);
        if world == before {
            world.take(Step::Source(source::Event::TimedOut));
            world.take(Step::Destination(destination::Event::TimedOut));
        }
    }
    Err("it comes to no end though nothing fails".into())
}

fn is_over(world: &World) -> bool {
    let (source, destination) = (&world.source, &world.destination);
    if source.power == Power::KeptOff {
        return destination.runs || destination.machine.arrival.is_none() && destination.on;
    }
    if source.power != Power::On || !destination.on {
        return false;
    }
    let of = source.machine.attempt;
    let past = &destination.machine.past;
    let cannot_say = past.iter().find(|(attempt, _)| *attempt == of);
    let cannot_say = cannot_say.is_none_or(|(_, verdict)| *verdict == Verdict::Starting);
    match source.machine.state {
        State::Resumed => destination.machine.arrival.is_none() && source.pending.is_empty(),
        State::GivenUp => true,
        State::InDoubt(..) => source.told && destination.machine.arrival.is_none() && cannot_say,
        _ => false,
    }
}

/// Takes one round of steps in which all goes well.
fn go_well(world: &mut World) {
    match world.source.power {
        Power::Off => world.take(Step::SourceBoots),
        Power::NoSender => world.take(Step::SenderStarts),
        Power::On | Power::KeptOff => {}
    }
    if !world.destination.on {
        world.take(Step::DestinationBoots);
    }
    deliver(world);
    if world.source.power == Power::On {
        source_goes_well(world);
    }
    destination_goes_well(world);
    deliver(world);
}

fn deliver(world: &mut World) {
    let take = |network: &mut Network| -> Vec<Packet> { std::mem::take(network).packets().collect() };
    for packet in take(&mut world.to_destination) {
        world.take(Step::ToDestination(packet));
    }
    let packets = take(&mut world.to_source);
    if world.source.power == Power::On {
        packets.into_iter().for_each(|packet| world.take(Step::ToSource(packet)));
    }
}

fn source_goes_well(world: &mut World) {
    while !world.source.pending.is_empty() {
        world.take(Step::SourceWrites);
    }
    match world.source.machine.state {
        State::Copying => world.take(Step::Source(source::Event::StopNow)),
        State::Stopping => world.take(Step::Stream),
        State::InDoubt(..) | State::Withdrawing(_) => world.take(Step::Source(source::Event::Connected)),
        _ => {}
    }
}

fn destination_goes_well(world: &mut World) {
    use destination::Event;
    while !world.destination.pending.is_empty() {
        world.take(Step::DestinationWrites);
    }
    let event = match world.destination.machine.phase() {
        Some(Phase::Checking) => Event::Fits,
        Some(Phase::Verifying(digest)) if world.destination.memory == Some(digest.0[0]) => Event::Verified,
        Some(Phase::Verifying(_)) => Event::Failed,
        Some(Phase::Starting) => Event::Arrived,
        _ => return,
    };
    world.take(Step::Destination(event));
}
