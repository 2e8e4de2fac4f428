#!/bin/sh
# Makes what TLS on one machine needs: an authority and a certificate for localhost, which the edge shows to
# clients (tls.*) and clients may show to it; and a second authority with one certificate for our services
# among themselves (internal.*), so that a client's certificate does not open the way inside.
# The owner's group may read, so that the users of containers can where they are given that group; nobody else.
# usage: make-certificates.sh DIRECTORY
set -eu
folder=$1
umask 027
mkdir -p "$folder"
cd "$folder"

# authority NAME TITLE
authority() {
    openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj "/CN=$2" \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
        -keyout "$1.key" -out "$1.crt" 2>/dev/null
}

# certificate NAME AUTHORITY COMMON_NAME ALTERNATIVE_NAMES
certificate() {
    openssl req -newkey rsa:2048 -nodes -subj "/CN=$3" -keyout "$1.key" -out "$1.csr" 2>/dev/null
    printf '%s\n' "subjectAltName=$4" 'extendedKeyUsage=serverAuth,clientAuth' >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.crt" -CAkey "$2.key" -CAcreateserial -days 365 \
        -extfile "$1.ext" -out "$1.crt" 2>/dev/null
    rm -f "$1.csr" "$1.ext" "$2.srl"
}

authority ca "Millrace local authority"
certificate tls ca localhost "DNS:localhost,DNS:envoy,IP:127.0.0.1"
authority internal-ca "Millrace local services"
certificate internal internal-ca millrace.internal "DNS:millrace.internal"
# openssl makes keys for their owner alone, and what was there before keeps its mode. The keys of the authorities
# sign certificates: no container needs them.
chmod 0750 .
chmod 0640 tls.key tls.crt ca.crt internal.key internal.crt internal-ca.crt
chmod 0600 ca.key internal-ca.key
echo "$folder/tls.crt and tls.key, signed by ca.crt: the edge (compose.tls.yml)"
echo "$folder/internal.crt and internal.key, signed by internal-ca.crt: services among themselves (compose.mtls.yml)"
