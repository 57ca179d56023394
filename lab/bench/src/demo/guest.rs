//! `make demo-guest`: a bare machine goes into an image, is powered off, and goes on as a guest of another
//! machine, which keeps its own work.

use std::time::{Duration, Instant};

use super::{Check, conclude, table, tell, try_next};
use mercury_lab::{
    as_guest::{self, Guest},
    error::{Error, Result},
    kernel::Kernel,
    live::say,
    machine::Machine,
    markdown::thousands,
    progress, restart,
    restart::{boot_id, check_chain, comes_further, count, knows_the_time, script},
    spec::Platform,
};

const KERNEL: Kernel = Kernel::BookwormGeneric;
const HOST: Kernel = Kernel::BookwormCloud;

/// The observations of the demonstration.
#[derive(Debug, Default)]
struct Seen {
    boot_before: String,
    boot_after: String,
    links_before: u64,
    off_after: Duration,
    back_after: Duration,
    chain: Option<String>,
    knows_the_time: bool,
    hosts_work: bool,
    complaints: Vec<String>,
}

/// Shows the demonstration.
///
/// # Errors
/// If a machine cannot be booted, or anything was lost, wrong or complained about.
pub(super) fn run() -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "Bochs starts on no disks of another machine" });
    }
    say("A machine with the devices of bare metal: building what is missing, then booting it");
    let source = Machine::boot(as_guest::source(KERNEL, 1))?;
    let mut seen = Seen::default();
    leave(&source, &mut seen)?;
    say("Another machine boots, with KVM, and gets work of its own");
    let host = source.boot_in_its_place(as_guest::host(HOST, &source))?;
    let work = host.start_work()?;
    let looked = arrive(&host, &mut seen);
    seen.hosts_work = work.finish().is_ok();
    looked?;
    seen.complaints.extend(host.check_health().err().map(|error| error.to_string()));
    print(&seen);
    verdict(&seen)
}

/// Starts the work of the machine, and writes the machine to its disk.
fn leave(source: &Machine, seen: &mut Seen) -> Result<()> {
    restart::start(source, "clock", script::CLOCK, "")?;
    restart::start(source, "chain", script::CHAIN, "")?;
    seen.boot_before = boot_id(source)?;
    seen.links_before = count(source, "chain")?;
    say("mercury checkpoint --poweroff: the whole machine into an image");
    let begun = Instant::now();
    progress::step("writing the image", || as_guest::checkpoint(source))?;
    seen.off_after = begun.elapsed();
    Ok(())
}

/// Starts the guest, and looks after the work that came with it.
fn arrive(host: &Machine, seen: &mut Seen) -> Result<()> {
    say("mercury restore --as-guest: the machine of the image goes on beside that work");
    let begun = Instant::now();
    let guest = progress::step("reading the image, and resuming the machine", || {
        Guest::start(host, "--console socket")
    })?;
    seen.back_after = begun.elapsed();
    tell(&host.sh("mercury guests list")?);
    seen.boot_after = boot_id(&guest)?;
    comes_further(&guest, "chain", count(&guest, "chain")?)?;
    seen.knows_the_time = knows_the_time(&guest, "in the guest").is_ok();
    seen.chain = restart::results(&guest, &["chain"])?.into_iter().next();
    seen.complaints.extend(guest.check_log().err().map(|error| error.to_string()));
    say("mercury guests stop: it ends, and the host goes on");
    tell(&guest.stop()?);
    Ok(())
}

fn print(seen: &Seen) {
    let mut table = table(&["", "seconds"]);
    let seconds = |time: Duration| format!("{:.0}", time.as_secs_f32());
    table.add_row(["until the machine was off, its image written".to_owned(), seconds(seen.off_after)]);
    table.add_row(["until it went on as a guest, its image read".to_owned(), seconds(seen.back_after)]);
    println!("\n{table}");
    println!("\nThe host is an emulated machine, and the guest is emulated in it: hardware is far quicker.");
}

/// # Errors
/// If anything was lost or wrong.
fn verdict(seen: &Seen) -> Result<()> {
    let chain = seen.chain.as_deref().unwrap_or_default();
    let links = chain.split(' ').next().and_then(|links| links.parse().ok()).unwrap_or(0);
    let checks = [
        Check::new(
            !seen.boot_before.is_empty() && seen.boot_before == seen.boot_after,
            "the same kernel runs on, and was not booted again",
        ),
        Check::new(
            links > seen.links_before && check_chain(chain).is_ok(),
            format!(
                "a process went on from {} hashes to {}, all right",
                thousands(seen.links_before),
                thousands(links)
            ),
        ),
        Check::new(seen.knows_the_time, "the guest knows the time"),
        Check::new(seen.hosts_work, "the host's own work went on, with right results"),
        Check::new(seen.complaints.is_empty(), "neither kernel complained"),
    ];
    conclude(&checks, seen.complaints.first().map(String::as_str))?;
    try_next(&[
        (
            "make demo-checkpoint",
            "the whole machine into an image, power off, and brought back on a bare machine",
        ),
        ("docs/guest.md", "how to do it with your own machines, and what is refused"),
    ]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The links that a chain of one hash has.
    const CHAIN: &str = "1 66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925";

    fn seen() -> Seen {
        Seen {
            boot_before: "a".into(),
            boot_after: "a".into(),
            chain: Some(CHAIN.into()),
            knows_the_time: true,
            hosts_work: true,
            ..Seen::default()
        }
    }

    #[test]
    fn whatever_is_wrong_breaks_a_promise() {
        assert!(verdict(&seen()).is_ok());
        let wrong = [
            Seen { boot_after: "b".into(), ..seen() },
            Seen { links_before: 1, ..seen() },
            Seen { chain: Some("1 00".into()), ..seen() },
            Seen { knows_the_time: false, ..seen() },
            Seen { hosts_work: false, ..seen() },
            Seen { complaints: vec!["WARNING".into()], ..seen() },
        ];
        assert!(wrong.iter().all(|seen| verdict(seen).is_err()));
    }
}
