//! What a URL says: where the server is, and the options.

use redis::{
    ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo, TlsCertificates,
};

use super::config::{RedisConfig, Target};
use super::error;
use super::sentinel::Sentinel;
use super::topology::Topology;
use crate::common::error::{Error, Result};
use crate::common::url_options::UrlOptions;

const OPTIONS: &str = "prefix, connect_timeout_ms, response_timeout_ms, cleanup_in_is_locked, \
                       tls_ca, tls_cert, tls_key, wait_for_replicas, wait_for_replicas_ms, \
                       sentinel_user, sentinel_password";

/// Reads a URL. The messages of errors do not repeat it, because it may hold a password.
pub(super) fn parse(url: &str) -> Result<RedisConfig> {
    let (address, mut options) = UrlOptions::split(url)?;
    let (scheme, rest) = address.split_once("://").ok_or_else(no_url)?;
    let (scheme, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
    let topology = match kind {
        "cluster" => {
            let nodes = hosts(scheme, rest, 6379)?;
            if nodes.iter().any(|node| node.redis_settings().db() != 0) {
                return Err(Error::invalid("a Redis Cluster has no databases; leave it out"));
            }
            Topology::Cluster(nodes)
        }
        "sentinel" => Topology::Sentinel(sentinel(scheme, rest, &mut options)?),
        _ => Topology::Single(single(address, &mut options)?),
    };
    let mut config = RedisConfig::new(Target::Ours(Box::new(topology)));
    if let Some(prefix) = options.take("prefix")? {
        config = config.prefix(prefix);
    }
    if let Some(timeout) = options.take_millis("connect_timeout_ms")? {
        config = config.connect_timeout(timeout);
    }
    if let Some(timeout) = options.take_millis("response_timeout_ms")? {
        config = config.response_timeout(timeout);
    }
    if let Some(enabled) = options.take_as("cleanup_in_is_locked", "true or false")? {
        config = config.cleanup_in_is_locked(enabled);
    }
    let replicas = options.take_as::<u32>("wait_for_replicas", "number of replicas")?;
    let patience = options.take_millis("wait_for_replicas_ms")?;
    if patience.is_some() && replicas.is_none() {
        return Err(Error::invalid("\"wait_for_replicas_ms\" needs \"wait_for_replicas\""));
    }
    if let Some(replicas) = replicas {
        let patience = patience.unwrap_or(RedisConfig::DEFAULT_REPLICA_TIMEOUT);
        config = config.wait_for_replicas(replicas, patience);
    }
    if let Some(certificates) = certificates(&mut options)? {
        config = config.certificates(certificates);
    }
    options.finish(OPTIONS)?;
    Ok(config)
}

fn no_url() -> Error {
    Error::invalid("this is no URL of a Redis server; it looks like redis://host:6379/0")
}

fn info(url: impl IntoConnectionInfo) -> Result<ConnectionInfo> {
    let info =
        url.into_connection_info().map_err(|cause| no_url().with_source(error::cause(&cause)))?;
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    Ok(info.set_redis_settings(settings))
}

/// One server. On a socket the login and the database are options, as the driver has them.
fn single(address: &str, options: &mut UrlOptions) -> Result<ConnectionInfo> {
    let server = info(address)?;
    let mut settings = server.redis_settings().clone();
    if matches!(server.addr(), ConnectionAddr::Unix(_)) {
        if let Some(database) = options.take_as("db", "number of a database")? {
            settings = settings.set_db(database);
        }
        if let Some(user) = options.take("user")? {
            settings = settings.set_username(user);
        }
        if let Some(password) = options.take("pass")? {
            settings = settings.set_password(password);
        }
    }
    Ok(server.set_redis_settings(settings))
}

/// Splits `login@host,host/path`.
fn authority(rest: &str) -> (&str, &str, &str) {
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    (login, hosts, path)
}

/// Several servers that are reached in the same way.
fn hosts(scheme: &str, rest: &str, default_port: u16) -> Result<Vec<ConnectionInfo>> {
    let (login, hosts, path) = authority(rest);
    let node = |host: &str| {
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
        let port = if has_port { String::new() } else { format!(":{default_port}") };
        info(format!("{scheme}://{login}@{host}{port}/{path}"))
    };
    hosts.split(',').map(node).collect()
}

/// `login@sentinel,sentinel/service/database`; the login is the primary's.
fn sentinel(scheme: &str, rest: &str, options: &mut UrlOptions) -> Result<Sentinel> {
    let (login_of_primary, addresses, path) = authority(rest);
    let (service, database) = path.split_once('/').unwrap_or((path, ""));
    if service.is_empty() {
        return Err(Error::invalid(
            "the URL names no service; it looks like redis+sentinel://host:26379/service/0",
        ));
    }
    let mut login = RedisConnectionInfo::default();
    if let Some(user) = options.take("sentinel_user")? {
        login = login.set_username(user);
    }
    if let Some(password) = options.take("sentinel_password")? {
        login = login.set_password(password);
    }
    let sentinels = hosts(scheme, addresses, 26379)?;
    let primary = info(format!("{scheme}://{login_of_primary}@primary/{database}"))?;
    Ok(Sentinel {
        nodes: sentinels.into_iter().map(|node| node.set_redis_settings(login.clone())).collect(),
        service: service.to_owned(),
        primary: primary.redis_settings().clone(),
    })
}

/// The certificates in the files that the options name.
fn certificates(options: &mut UrlOptions) -> Result<Option<TlsCertificates>> {
    let mut read = |name| options.take_file(name);
    let (root_cert, client_cert, client_key) =
        (read("tls_ca")?, read("tls_cert")?, read("tls_key")?);
    let client_tls = match (client_cert, client_key) {
        (Some(client_cert), Some(client_key)) => Some(ClientTlsConfig { client_cert, client_key }),
        (None, None) => None,
        _ => return Err(Error::invalid("\"tls_cert\" and \"tls_key\" go together")),
    };
    let is_given = root_cert.is_some() || client_tls.is_some();
    Ok(is_given.then_some(TlsCertificates { client_tls, root_cert }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(url: &str) -> Topology {
        match parse(url).expect(url).target {
            Target::Ours(topology) => *topology,
            Target::Theirs(_) => unreachable!("from a URL"),
        }
    }

    #[test]
    fn clusters_and_sentinels_are_several_hosts() {
        let Topology::Cluster(nodes) =
            topology("rediss+cluster://me:p%40@a:7000,[::1]:7001,c/?prefix=%7Bx%7D")
        else {
            panic!("a cluster");
        };
        let shown: Vec<_> = nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!(shown, ["a:7000", "::1:7001", "c:6379"]);
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("p@")));
        let Topology::Sentinel(found) =
            topology("redis+sentinel://:secret@a,b:26380/shop/3?sentinel_password=other")
        else {
            panic!("sentinels");
        };
        assert_eq!(found.service, "shop");
        assert_eq!(found.primary.db(), 3);
        assert_eq!(found.primary.password(), Some("secret"));
        let logins = found.nodes.iter().map(|node| node.redis_settings().password());
        assert!(logins.into_iter().all(|password| password == Some("other")));
        let shown: Vec<_> = found.nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!(shown, ["a:26379", "b:26380"]);
    }

    #[test]
    fn sockets_take_their_login_from_the_options() {
        let Topology::Single(info) = topology("redis+unix:///run/redis.sock?db=2&pass=x") else {
            panic!("one server");
        };
        assert_eq!(info.redis_settings().db(), 2);
        assert_eq!(info.redis_settings().password(), Some("x"));
    }

    #[test]
    fn what_makes_no_sense_is_refused_without_repeating_it() {
        for url in [
            "",
            "canary",
            "redis:canary",
            "redis://canary:6379/x",
            "redis://h/0?canary=1",
            "redis://h/0?tls_ca=/canary/nowhere",
            "redis://h/0?tls_cert=/dev/null",
            "redis://h/0?connect_timeout_ms=canary",
            "redis+cluster://h:7000/canary",
            "redis+cluster://h:7000/1",
            "redis+sentinel://canary",
            "http://canary/",
        ] {
            let error = parse(url).expect_err(url);
            assert_eq!(error.code(), crate::ErrorCode::InvalidArgument, "{url}");
            let shown = format!("{error}");
            assert!(!shown.contains("canary"), "{shown}");
        }
    }
}
