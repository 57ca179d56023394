//! Tests of the command line as a whole: its definition, manual pages and completions.

use crate::{
    args::Cli,
    generate::{completions, man},
};
use clap::{Command, CommandFactory, Parser};
use std::{collections::BTreeSet, fs};

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn examples_parse() {
    for line in [
        "mercury doctor --json",
        "mercury attach --cpus 0-3,8 --unload-kvm",
        "mercury --json status --watch",
        "mercury bench switch --cycles 200",
        "mercury checkpoint --every 10m --keep 6 --incremental --full-every 4 /net/node7",
        "mercury checkpoint --incremental=/net/base /net/next",
        "mercury merge /dev/sdb1 /net/base /net/next",
        "mercury receive --listen 10.9.0.3",
        "mercury receive --listen 10.9.0.3:99 --delay 10s --prepare /run/x --boot-menu",
        "mercury migrate 10.9.0.3 --key - --max-downtime 800ms --or-give-up",
        "mercury migrate --dry-run",
        "mercury fault 4 --cpu 1 --offset 0x10",
    ] {
        let parsed = Cli::try_parse_from(line.split(' '));
        assert_eq!(parsed.is_ok(), !line.contains("0x10"), "{line}");
    }
    let wrong = [
        "attach --cpus 3-1",
        "merge out",
        "migrate",
        "receive --listen ::1",
        "receive --boot-menu",
        "checkpoint --full-every 3 x",
        "checkpoint --incremental base new",
    ];
    for line in wrong {
        assert!(Cli::try_parse_from(format!("mercury {line}").split(' ')).is_err(), "{line}");
    }
}

/// Returns the words of the `mercury` command in a line of a document: up to a comment, or to a character of
/// the shell that ends it.
fn words(line: &str) -> Option<Vec<String>> {
    let command = line.strip_prefix("    ")?.trim_start();
    let assigned = |(name, value): &(&str, &str)| {
        name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_') && value.contains(" mercury ")
    };
    let command = match command.split_once('=').filter(assigned) {
        Some((_, value)) => &value[value.find("mercury ")?..],
        None => command,
    };
    let command = command.strip_prefix("mercury ")?.split(['<', '>', '|', ';', '#']).next()?;
    let quoted = command.split('\'').enumerate();
    let mut words = vec!["mercury".to_owned()];
    for (index, part) in quoted {
        match index % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    Some(words)
}

/// Each command in the documents is one that the command line takes. The table of README.md is left out: it
/// has explanations beside the commands.
#[test]
fn commands_of_the_documents_parse() {
    let mut count = 0;
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    for page in fs::read_dir(docs).expect("the documents") {
        let page = page.expect("a document").path();
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = fs::read_to_string(&page).expect("text").replace("\\\n", " ");
        for words in text.lines().filter_map(words) {
            count += 1;
            if let Err(error) = Cli::try_parse_from(&words) {
                panic!("{} has {words:?}: {error}", page.display());
            }
        }
    }
    assert!(count >= 25, "only {count} commands were found");
}

#[test]
fn pages_for_all_commands() {
    let directory = tempfile::tempdir().expect("temporary directory");
    man(Cli::command(), directory.path()).expect("pages");
    for name in ["mercury", "mercury-attach", "mercury-doctor", "mercury-bench-switch"] {
        let text = fs::read_to_string(directory.path().join(format!("{name}.8"))).expect(name);
        assert!(text.contains("not possible on this machine"), "{name}");
    }
    for page in fs::read_dir(directory.path()).expect("pages") {
        let page = page.expect("a page").path();
        let text = fs::read_to_string(&page).expect("text");
        for section in ["SYNOPSIS", "EXIT STATUS", "ENVIRONMENT", "EXAMPLES", "SEE ALSO"] {
            let heading = if section.contains(' ') { format!("{section:?}") } else { section.to_owned() };
            assert!(text.contains(&format!(".SH {heading}\n")), "{section} in {}: {text}", page.display());
        }
        let has_files = !page.to_string_lossy().contains("hosted");
        assert_eq!(text.contains(".SH FILES\n"), has_files, "{}", page.display());
    }
    let text = fs::read_to_string(directory.path().join("mercury-migrate.8")).expect("a page");
    assert!(text.contains("MERCURY_KEY") && !text.contains("pause"), "{text}");
    assert!(!directory.path().join("mercury-fault.8").exists());
}

#[test]
fn completions_for_three_shells() {
    let directory = tempfile::tempdir().expect("temporary directory");
    completions(&Cli::command(), directory.path()).expect("completions");
    assert_eq!(fs::read_dir(directory.path()).expect("directory").count(), 3);
}

#[test]
fn bash_completes_the_codes_of_explain() {
    let directory = tempfile::tempdir().expect("temporary directory");
    completions(&Cli::command(), directory.path()).expect("completions");
    let script = format!(
        ". {}/mercury.bash; COMP_WORDS=(mercury explain svm-) COMP_CWORD=2 COMP_LINE='mercury explain svm-'; \
         _mercury mercury svm- explain; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        directory.path().display()
    );
    let output = std::process::Command::new("bash").args(["-c", &script]).output().expect("bash");
    let offered = String::from_utf8(output.stdout).expect("text");
    let offered: BTreeSet<&str> = offered.lines().collect();
    let wanted = mercury_abi::code::Code::ALL.iter().map(|code| code.name());
    assert_eq!(offered, wanted.filter(|name| name.starts_with("svm-")).collect());
    for name in ["_mercury", "mercury.fish"] {
        let text = fs::read_to_string(directory.path().join(name)).expect(name);
        assert!(text.contains("svm-disabled"), "{name}");
    }
}

/// Collects the names of all hidden parts, at any depth, or of all others.
fn names(command: &Command, hidden: bool, into: &mut BTreeSet<String>) {
    let options = command.get_arguments().filter(|arg| arg.is_hide_set() == hidden);
    into.extend(options.filter_map(|arg| Some(format!("--{}", arg.get_long()?))));
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        names(sub, hidden, into);
    }
}

#[test]
fn completions_offer_what_is_shown_and_nothing_that_is_hidden() {
    let directory = tempfile::tempdir().expect("temporary directory");
    completions(&Cli::command(), directory.path()).expect("completions");
    let bash = fs::read_to_string(directory.path().join("mercury.bash")).expect("a file");
    let words: BTreeSet<&str> = bash.split([' ', '"', '\n', ')', '(']).collect();
    let [mut hidden, mut shown] = [BTreeSet::new(), BTreeSet::new()];
    names(&Cli::command(), true, &mut hidden);
    names(&Cli::command(), false, &mut shown);
    assert!(hidden.len() > 5 && shown.len() > 50);
    assert!(shown.iter().all(|name| words.contains(name.as_str())), "{shown:?}");
    for name in hidden.difference(&shown) {
        assert!(!words.contains(name.as_str()), "{name}");
    }
    for subcommand in Cli::command().get_subcommands() {
        let is_offered = words.contains(format!("mercury,{}", subcommand.get_name()).as_str());
        assert_eq!(is_offered, !subcommand.is_hide_set(), "{}", subcommand.get_name());
    }
}

#[test]
fn options_of_a_guest_need_one() {
    let read = |line: &str| Cli::try_parse_from(format!("mercury restore {line}").split(' '));
    for right in [
        "x",
        "--as-guest x",
        "x --as-guest --name db --net passt --forward 2222:22 --disk a,ro --disk b --console socket",
        "x --as-guest --net tap=tap0 --mac 52:54:00:12:34:56",
        "x --as-guest --memory-file /var/tmp/x",
        "x --as-guest --overcommit-cpus",
        "x --as-guest --force-server-disks",
    ] {
        assert!(read(right).is_ok(), "{right}: {:?}", read(right).err());
    }
    for wrong in [
        "--name db x",
        "--net passt x",
        "--disk a x",
        "--overcommit-cpus x",
        "--force-server-disks x",
        "--memory-file a x",
        "--console socket x",
        "--as-guest --name a/b x",
        "--as-guest --net bridge x",
        "--as-guest --forward 1:1 x",
        "--as-guest --here x",
        "--as-guest --prepare /boot/x x",
        "--as-guest --force-disks x",
        "--as-guest --memory 256M x",
        "--as-guest",
    ] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn options_of_a_guest_that_moves_here_need_one() {
    let read = |line: &str| Cli::try_parse_from(format!("mercury receive {line}").split(' '));
    for right in [
        "--beside",
        "--beside --name db --net tap=tap0 --memory-limit 4G",
        "--beside --listen 10.9.0.3:99 --lifetime 1h --hold-for-ever",
        "--beside --disk-folder /srv/machines",
        "--beside --overcommit-cpus",
    ] {
        assert!(read(right).is_ok(), "{right}: {:?}", read(right).err());
    }
    for wrong in [
        "--name db",
        "--net passt",
        "--beside --console socket",
        "--memory-limit 4G",
        "--disk-folder /srv",
        "--beside --disk /dev/sda",
        "--beside --memory 256M",
        "--beside --delay 1s",
        "--beside --prepare /boot/x",
    ] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}
