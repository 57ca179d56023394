//! `make demo-disco`: 32 Linux machines begin as copies of one that was saved, and share memory.

use std::collections::BTreeSet;

use super::{Check, conclude, table, tell, try_next};
use crate::disco::{Background, Files, MANY, fork, many};
use mercury_lab::{error::Result, image::Release, live::say, progress};

/// The observations of the demonstration.
#[derive(Debug, Default)]
struct Seen {
    boot_ms: f64,
    many_ms: f64,
    answers: usize,
    /// The different random numbers that the machines have made.
    random: usize,
    base_mib: f64,
    own_mib: f64,
    /// The time in which a machine that was forked stood still.
    pause_ms: f64,
    /// True if its copy has answered as another machine.
    copy_answers: bool,
    is_empty: bool,
}

/// Shows the demonstration.
///
/// # Errors
/// If a machine does not begin, or does not answer.
pub(super) fn run() -> Result<()> {
    let mut seen = Seen::default();
    say("A Linux boots as an ordinary process: building what is missing, which takes a while the first time");
    let files = progress::step("building", || Files::make(Release::Bookworm))?;
    seen.boot_ms = files.boot_once()?;
    say(
        "mercury hosted save, mercury disco template: the machine, with its interpreter, waits as a template",
    );
    progress::step("saving it", || files.make_template())?;
    say(&format!(
        "mercury disco run --count {MANY}: as many machines as copies of it, and a question to each"
    ));
    let (many_ms, names) = many(&files)?;
    seen.many_ms = many_ms;
    let machines = Background::all(&names);
    let answers: Vec<String> = machines.iter().filter_map(Background::answer).collect();
    seen.answers = answers.len();
    let mut different: BTreeSet<String> = answers.into_iter().collect();
    seen.random = different.len();
    let (base_mib, idle) = crate::disco::memory(&files)?;
    (seen.base_mib, seen.own_mib) = (base_mib, idle.own);
    say("mercury disco map: what they share, and what each has for itself");
    let shown = files.text(&["disco", "map"])?;
    tell(&shown.lines().take(6).collect::<Vec<_>>().join("\n"));
    tell(&format!("    ... {} lines more", shown.lines().count().saturating_sub(6)));
    let first = names[0].as_str().unwrap_or_default();
    say(&format!("mercury disco fork {first}: a copy of that machine as it is now, while it runs on"));
    let (pause_ms, _, copy) = fork(&files, first)?;
    (seen.pause_ms, seen.copy_answers) =
        (pause_ms, copy.answer().is_some_and(|answer| different.insert(answer)));
    say("mercury disco rm: the template and all of its machines end");
    files.remove()?;
    seen.is_empty = !files.text(&["disco", "list"])?.contains(&files.template);
    print(&seen);
    verdict(&seen)
}

fn print(seen: &Seen) {
    let mut table = table(&["", "milliseconds"]);
    table.add_row(["a boot, to its first answer".to_owned(), format!("{:.0}", seen.boot_ms)]);
    table.add_row([format!("{MANY} copies, to the answer of the last"), format!("{:.0}", seen.many_ms)]);
    table.add_row(["the machine that was forked stood still".to_owned(), format!("{:.1}", seen.pause_ms)]);
    println!("\n{table}");
    println!(
        "\nThe template has {:.1} MiB. A copy has {:.1} MiB of its own, in the mean.",
        seen.base_mib, seen.own_mib
    );
}

/// # Errors
/// If anything was wrong.
fn verdict(seen: &Seen) -> Result<()> {
    let checks = [
        Check::new(seen.answers == MANY, format!("{} of {MANY} machines have answered", seen.answers)),
        Check::new(seen.random == MANY, "each kernel makes random numbers of its own"),
        Check::new(
            seen.many_ms < seen.boot_ms * MANY as f64 / 10.0,
            format!("all together took less than a tenth of {MANY} boots"),
        ),
        Check::new(seen.own_mib * 4.0 < seen.base_mib, "a copy shares most of its memory"),
        Check::new(seen.copy_answers, "the copy of a running machine answers, as a machine of its own"),
        Check::new(seen.is_empty, "nothing is left of them"),
    ];
    conclude(&checks, None)?;
    try_next(&[
        ("make hosted", "a Debian in a process, with a shell"),
        ("docs/disco.md", "how to do it with your own machine, what is shared, and what is not"),
    ]);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_an_answer_breaks_a_promise() {
        let seen = || Seen {
            boot_ms: 1000.0,
            many_ms: 300.0,
            answers: MANY,
            random: MANY,
            base_mib: 20.0,
            own_mib: 1.0,
            pause_ms: 1.5,
            copy_answers: true,
            is_empty: true,
        };
        assert!(verdict(&seen()).is_ok());
        assert!(verdict(&Seen { answers: MANY - 1, ..seen() }).is_err());
        assert!(verdict(&Seen { random: 1, ..seen() }).is_err());
        assert!(verdict(&Seen { own_mib: 10.0, ..seen() }).is_err());
        assert!(verdict(&Seen { copy_answers: false, ..seen() }).is_err());
    }
}
