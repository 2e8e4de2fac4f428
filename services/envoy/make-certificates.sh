#!/bin/sh
# Makes a certificate authority and a certificate for localhost that servers and clients may show, for trying
# TLS on one machine.
# usage: make-certificates.sh DIRECTORY
set -eu
folder=$1
umask 077
mkdir -p "$folder"
cd "$folder"
openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj "/CN=Millrace local authority" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
    -keyout ca.key -out ca.crt 2>/dev/null
openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout tls.key -out tls.csr 2>/dev/null
printf '%s\n' 'subjectAltName=DNS:localhost,DNS:envoy,IP:127.0.0.1' 'extendedKeyUsage=serverAuth,clientAuth' >tls.ext
openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile tls.ext -out tls.crt 2>/dev/null
rm -f tls.csr tls.ext ca.srl
echo "$folder/tls.crt and tls.key, signed by $folder/ca.crt"
